"""The identity of a consumer in its checkpoint: its sources, its outputs, and the location of its store.

A name alone does not identify a consumer: another application may have the same name by mistake, and would continue
from the position of the first. So each commit records the identity, and each start compares it.

* **Sources** are a label selector, or the names of a shard's journals. A new journal that a selector matches, or that
  is added to a shard, is not a change.
* **Outputs** are the names of tables and journals. The outputs of a Spark application are known from its transactions.
  The record marks outputs that only some transactions of an instance have. So a change is an output that the record
  lacks, or an output of all recorded transactions that the first transaction of an instance lacks. A shard's outputs
  are known when it starts: the tables of its store, and the journals that its application declares (`publishes`).
  Journals that it chooses for each message do not count.
* **The store** is its location: a database, a catalog, or a recovery log. So a copy of the database at another location
  is a change.

A change is an error unless `accept_changes` has its code, which confirms this change only. Once a commit has recorded
the new identity, the code has no effect. A checkpoint without an identity, as Gazette and earlier versions write it, is
accepted, and the next commit records the identity.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

import structlog

from coranto.errors import ConsumerChanged, InvalidInput
from coranto.labels import format_selector, parse_selector
from coranto.messages.checkpoints import Checkpoint, Identity

_CODE_LENGTH: Final = 12
_MAX_SHOWN: Final = 10
_MAX_TEXT: Final = 500
_JOURNALS: Final = "journals "
"""Prefix of the sources of a consumer that reads journals by their names."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Change:
    """A part of a consumer that differs from its record, and the loss if it continues."""

    part: str
    before: str
    now: str
    loss: str

    def __str__(self) -> str:
        before, now = (text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…" for text in (self.before, self.now))
        return f"{self.part}: recorded {before or 'none'}, now {now or 'none'}; {self.loss}"


def code_of(changes: Collection[Change]) -> str:
    """Return the code that confirms changes."""
    text = json.dumps(sorted((each.part, each.before, each.now) for each in changes))
    return hashlib.sha256(text.encode()).hexdigest()[:_CODE_LENGTH]


class IdentityCheck:
    """Compares a consumer with the record in its checkpoint, and keeps the record for its next commits.

    `accepted` has the codes of confirmed changes, separated by commas.
    """

    def __init__(self, name: str, accepted: str | None = None) -> None:
        self._name = name
        self._accepted = {each.strip() for each in (accepted or "").split(",")} - {""}
        self.record = Identity()
        """The identity to commit."""
        self._changes: list[Change] = []
        self._offsets: Mapping[str, int] = {}
        self._has_outputs = False
        self.is_compared = False
        """True after a restored checkpoint was compared."""

    def restored(
        self,
        checkpoint: Checkpoint,
        now: Identity,
        unread: Callable[[], Collection[str]],
        *,
        outputs_known: bool = False,
    ) -> None:
        """Compare sources and store with a restored checkpoint, and outputs if they are known already.

        `unread` returns the journals of the checkpoint that are not sources any more. Raises ConsumerChanged, except
        if the outputs are not known yet and a code was given: it may cover them, too.
        """
        known = checkpoint.identity
        self._offsets = checkpoint.offsets
        self._changes = _changed_parts(known, now, unread, self._offsets)
        self._has_outputs = False
        self.record = replace(known, sources=now.sources, store=now.store)
        self.is_compared = True
        if outputs_known:
            self._compare(now.outputs, known)
        if outputs_known or not self._accepted:
            self.require_confirmed()

    def require_confirmed(self) -> None:
        """Raise ConsumerChanged for unconfirmed changes. Call it before a commit."""
        if not self._changes:
            return
        code = code_of(self._changes)
        found = ". ".join(map(str, self._changes))
        if code not in self._accepted:
            raise ConsumerChanged(
                f"consumer {self._name} is not the one that its checkpoint records. {found}. If this is another "
                f"consumer, give it another name. If the change is meant, confirm it once: accept_changes='{code}', or "
                f"--accept-changes {code} for shards"
            )
        _log.warning("consumer.changed", consumer=self._name, code=code, changes=[str(each) for each in self._changes])
        self._changes = []

    def take(self, outputs: Collection[str]) -> None:
        """Add the outputs of a transaction, before they are written. Raises ConsumerChanged."""
        if not self._has_outputs:
            self._compare(frozenset(outputs), self.record)
            self.require_confirmed()
            return
        always = self.record.outputs - self.record.sometimes
        self.record = replace(
            self.record,
            outputs=self.record.outputs | set(outputs),
            sometimes=self.record.sometimes | (always ^ (set(outputs) - self.record.sometimes)),
        )

    def _compare(self, outputs: frozenset[str], known: Identity) -> None:
        self._has_outputs = True
        added = outputs - known.outputs
        missing = known.outputs - known.sometimes - outputs
        sometimes = known.sometimes
        if known.outputs and (added or missing):
            at = _shown([f"{journal} {offset}" for journal, offset in sorted(self._offsets.items())])
            losses = [f"{_shown(sorted(missing))} gets nothing any more"] if missing else []
            losses += [f"{_shown(sorted(added))} gets nothing of the earlier messages ({at})"] if added else []
            change = Change("outputs", _shown(sorted(known.outputs)), _shown(sorted(outputs)), ", ".join(losses))
            self._changes.append(change)
            sometimes = sometimes | missing
        self.record = replace(self.record, outputs=known.outputs | outputs, sometimes=sometimes)


def _changed_parts(
    known: Identity, now: Identity, unread: Callable[[], Collection[str]], offsets: Mapping[str, int]
) -> list[Change]:
    found = []
    if known.sources and known.sources != now.sources and (left := _left_out(known, now, unread)) is not None:
        begins = [f"{journal} from {offsets[journal]} on" for journal in sorted(left) if journal in offsets]
        loss = f"the rest of {_shown(begins)} is not read" if begins else "it reads other journals than before"
        found.append(Change("sources", known.sources, now.sources, loss))
    if known.store and now.store and known.store != now.store:
        loss = (
            "commits there since this copy was made are lost here, and a consumer that still runs there "
            "reads and publishes the same messages"
        )
        found.append(Change("store", known.store, now.store, loss))
    return found


def _left_out(known: Identity, now: Identity, unread: Callable[[], Collection[str]]) -> Collection[str] | None:
    """Return the journals of the checkpoint that are not read any more. None if journals were only added by name."""
    if names_of(known.sources) <= names_of(now.sources) and known.sources.startswith(_JOURNALS):
        return None
    return unread()


def sources_of(wanted: str | Collection[str]) -> str:
    """Return sources as the record has them, from a label selector or from names. Raises InvalidInput."""
    return format_selector(parse_selector(wanted)) if isinstance(wanted, str) else journals_source(wanted)


def journals_source(names: Collection[str]) -> str:
    """Return sources as the record has them, from the names of journals."""
    return _JOURNALS + ", ".join(sorted(names))


def journal_outputs(wanted: str | Collection[str]) -> frozenset[str]:
    """Return journal outputs as the record has them, from a label selector or from names."""
    return frozenset(f"journals {each}" for each in ([wanted] if isinstance(wanted, str) else wanted) if each)


def names_of(sources: str) -> frozenset[str]:
    """Return the journals in sources from `journals_source`. Empty for a label selector."""
    if not sources.startswith(_JOURNALS):
        return frozenset()
    return frozenset(sources.removeprefix(_JOURNALS).split(", ")) - {""}


def checked_codes(text: str) -> str:
    """Return `accept_changes` unchanged. Raises InvalidInput if it is not a list of codes."""
    for each in text.split(","):
        code = each.strip()
        if code and (len(code) != _CODE_LENGTH or not set(code) <= set("0123456789abcdef")):
            raise InvalidInput(
                f"{code!r} is not the code of a change; the error about the change names it", field="accept_changes"
            )
    return text


def _shown(texts: Collection[str]) -> str:
    listed = list(texts)
    more = f" and {len(listed) - _MAX_SHOWN} more" if len(listed) > _MAX_SHOWN else ""
    return ", ".join(listed[:_MAX_SHOWN]) + more
