"""The places where one audit keeps records: each journal's first fragment store, or one place for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from coranto.audit.findings import Finding, Kind, Severity, Subject
from coranto.audit.gathered_journal import GatheredJournal
from coranto.audit.memory import AuditMemory, Remembered, StoreMemory
from coranto.audit.remembered import JournalRecord, newest
from coranto.audit.sealing import Seal
from coranto.audit.witness import BrokerWitness
from coranto.client import JournalClient, JournalInfo
from coranto.errors import CorantoError
from coranto.fragments.stores import StoreRegistry

_SHOWN: Final = 3
_NOTE: Final = "records of audits"
"""The name of the brokers' note about records in a store."""


@dataclass(slots=True)
class _RecordPlace:
    """One place of records, and the records that were read from it."""

    url: str
    memory: AuditMemory | None
    loaded: Remembered = field(default_factory=Remembered)
    problem: str = ""


class RecordPlaces:
    """All places of one audit, and the records that were read there."""

    def __init__(self, client: JournalClient, stores: StoreRegistry, url: str, memory: AuditMemory | None) -> None:
        """`url` is the only place; if it is empty, journals' stores are the places. `memory` replaces all of them."""
        self._client = client
        self._stores = stores
        self._url = url
        self._given = memory
        self._places: dict[str, _RecordPlace] = {}

    @property
    def records(self) -> dict[str, JournalRecord]:
        """The latest record of each journal."""
        return newest(place.loaded.records for place in self._places.values())

    async def load(self, journals: Sequence[GatheredJournal], stores: Sequence[str]) -> None:
        """Read the records. `stores` may have records of journals that are gone."""
        urls = {self.place_of(present) for present in journals}
        if self._is_single:
            urls.add(self._url)
        else:
            # Records stay in their store when another store becomes the first one.
            urls.update(url for present in journals for url in present.info.spec.fragment.stores)
            urls.update(stores)
        for url in sorted(urls):
            self._places[url] = place = _RecordPlace(url, self._given)
            try:
                if place.memory is None:
                    if not url:
                        place.problem = (
                            "it has no fragment store to keep records in; name a place (memory, or --memory of coranto "
                            "audit)"
                        )
                        continue
                    witness = BrokerWitness(self._client, url, _NOTE)
                    place.memory = StoreMemory(self._stores.get(url), Seal.of(self._client.config.auth), witness)
                place.loaded = await place.memory.load()
            except (CorantoError, OSError) as error:
                place.problem = str(error)

    @property
    def _is_single(self) -> bool:
        return bool(self._url) or self._given is not None

    def place_of(self, present: GatheredJournal) -> str:
        """Return the URL of the place of a journal's record."""
        return self._url if self._is_single else _first_store(present.info)

    def covered(self, others: Iterable[JournalInfo]) -> set[str]:
        """Return the URLs of places that cannot have records of `others`, the journals that are not audited.

        The records that were read do not prove that: others may be lost.
        """
        if self._is_single:
            return set() if list(others) else {self._url}
        return set(self._places) - {_first_store(info) for info in others}

    async def save(
        self, new: Mapping[str, Mapping[str, JournalRecord]], gone: set[str], at: float, accepted: set[str]
    ) -> list[Finding]:
        """Save new records, by place, without records of journals that are `gone`. Return a finding for each failure.

        Records that contradict the brokers' note of them stay as they are, unless their place is `accepted`.
        """
        found = []
        for url, place in self._places.items():
            if place.memory is None or place.problem or (place.loaded.broken and url not in accepted):
                continue
            forgotten = gone & place.loaded.records.keys()
            try:
                if forgotten or new.get(url):
                    await place.memory.save(new.get(url, {}), at, forget=forgotten, accept=bool(place.loaded.broken))
            except (CorantoError, OSError) as error:
                found.append(
                    Finding(
                        Kind.MEMORY_UNREACHABLE,
                        Severity.ERROR,
                        Subject.store(url),
                        f"this audit could not be recorded, so later ones cannot find losses since: {error}",
                    )
                )
        return found

    def findings(self, weight: Severity) -> list[Finding]:
        """Return the problems of the places, as findings of this weight."""
        return [each for place in self._places.values() for each in _about(place, weight)]


def _first_store(info: JournalInfo) -> str:
    urls = info.spec.fragment.stores
    return urls[0] if urls else ""


def _about(place: _RecordPlace, weight: Severity) -> list[Finding]:
    subject, loaded = Subject.store(place.url or "none"), place.loaded
    found = [
        Finding(
            Kind.MEMORY_DAMAGED,
            weight,
            subject,
            f"a record of earlier audits cannot be read and is ignored: {problem}. It is replaced after "
            "a few more audits; restore it if there is a copy",
        )
        for problem in loaded.damaged
    ]
    if place.problem:
        text = f"the records of earlier audits cannot be read, so losses cannot be found: {place.problem}"
        found.append(Finding(Kind.MEMORY_UNREACHABLE, weight, subject, text))
    elif loaded.broken:
        found.append(_contradicted(subject, loaded.broken, weight))
    elif loaded.statement is None:
        text = (
            "brokers do not know the records of audits in it: they are Gazette's or of an earlier version, or the "
            "token lacks the capability NOTE or does not cover the store. Deletion of newer records there "
            "is not detected"
        )
        found.append(Finding(Kind.MEMORY_UNWITNESSED, Severity.INFO, subject, text))
    return found


def _contradicted(subject: Subject, broken: Sequence[str], weight: Severity) -> Finding:
    """Return the finding about records that contradict the brokers' note of them."""
    shown = "; ".join(broken[:_SHOWN]) + (f"; and {len(broken) - _SHOWN} more" if len(broken) > _SHOWN else "")
    return Finding(
        Kind.MEMORY_DAMAGED,
        weight,
        subject,
        f"the records of earlier audits contradict the brokers' note of them: {shown}. Files were changed, removed or "
        "added, or the store or etcd was restored from a backup. Later losses may be unknown, and nothing is "
        "recorded until the files are as they were: restore them from a copy. If there is none, accept all journals "
        "that may have records there (coranto audit --accept, without a selector or with one that selects all of them)",
        {"files": list(broken)},
    )
