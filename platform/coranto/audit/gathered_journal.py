"""The current state of a journal, which an audit has gathered from brokers and stores. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from coranto.audit.findings import Fact
from coranto.audit.remembered import Key, KnownFragment
from coranto.client.heads import JournalHead
from coranto.client.values import JournalInfo
from coranto.fragments.codecs import can_hold
from coranto.fragments.fragment import Codec, Fragment


@dataclass(frozen=True, slots=True)
class GatheredJournal:
    """The current state of a journal. `at` is the time of gathering, in Unix seconds.

    `objects` are the fragments that the audit itself has found in the stores. `index` is the brokers' listing,
    gathered after that. `gone` are fragments of the index that their stores do not have. `unreadable` are files in the
    journal's folders with names that are not fragments', each with the reason. `unlisted` are the stores that could not
    be listed, each with the reason: then `objects` is incomplete. `found_again` are fragments that an earlier audit
    found lost, and whose content this audit has read again, in other fragments.
    """

    info: JournalInfo
    head: JournalHead
    at: float
    cluster: str = ""
    objects: Sequence[Fragment] = ()
    index: Sequence[Fragment] = ()
    gone: Sequence[Fragment] = ()
    unreadable: Sequence[tuple[str, str]] = ()
    unlisted: Sequence[tuple[str, str]] = ()
    found_again: frozenset[Key] = frozenset()
    verified: Mapping[Key, float] = field(default_factory=dict)
    """The fragments whose content this audit has verified, with the time."""
    bad: Mapping[Key, str] = field(default_factory=dict)
    """The fragments whose content this audit has found to differ from their names, with the fault."""
    reassigned: Sequence[tuple[KnownFragment, str]] = ()
    """Fragments that only brokers had at the last audit and whose content has changed since, with the new SHA-1."""
    problem: str = ""
    """The reason why the brokers' index is unknown; empty if it is known."""

    @property
    def journal(self) -> str:
        return self.info.name

    @property
    def complete(self) -> bool:
        """True if all stores and the brokers' index are known."""
        return not self.unlisted and not self.problem and self.head.known

    @property
    def retention_seconds(self) -> float:
        return self.info.spec.fragment.retention.ToNanoseconds() / 1e9

    @property
    def keys(self) -> set[Key]:
        """The offsets and SHA-1s of all existing fragments, in stores or at brokers."""
        return {known(each).key for each in (*check_file_lengths(self.objects).stored, *self.live)}

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The spans of all existing fragments."""
        return [(each.begin, each.end) for each in (*check_file_lengths(self.objects).stored, *self.live)]

    @property
    def live(self) -> list[Fragment]:
        """The fragments that only brokers have."""
        return [each for each in self.index if not each.backing_store and each.length]


@dataclass(slots=True)
class CheckedObjects:
    """Stored fragments, and objects whose file lengths do not fit their names."""

    stored: list[Fragment] = field(default_factory=list)
    implausible: list[Fragment] = field(default_factory=list)


def check_file_lengths(objects: Sequence[Fragment]) -> CheckedObjects:
    """Split objects by whether the lengths of their files fit their names."""
    checked = CheckedObjects()
    for each in objects:
        fits = each.file_bytes is None or can_hold(each.codec, each.file_bytes, each.length)
        (checked.stored if fits else checked.implausible).append(each)
    return checked


def known(fragment: Fragment) -> KnownFragment:
    """Return a fragment in the form of records."""
    plain = KnownFragment(fragment.begin, fragment.end, fragment.sum.hex())
    if not fragment.backing_store:
        return plain
    return plain._replace(
        mod_time=fragment.mod_time,
        store=fragment.backing_store,
        codec=fragment.codec.value,
        postfix=fragment.path_postfix,
    )


def file_facts(journal: str, fragments: Iterable[KnownFragment]) -> dict[str, Fact]:
    """Return facts that name fragments: `fragments` by offsets and SHA-1, and `files` with `stores`, in the same order.

    A file is its path in the store, which may lack it; its store is empty if only brokers had the content.
    """
    each = list(fragments)
    files = [
        Fragment(
            journal,
            known.begin,
            known.end,
            bytes.fromhex(known.sum),
            Codec.from_wire(known.codec or Codec.NONE),
            path_postfix=known.postfix,
        ).content_path
        for known in each
    ]
    return {
        "fragments": [f"{known.begin:016x}-{known.end:016x}-{known.sum}" for known in each],
        "files": files,
        "stores": [known.store for known in each],
    }
