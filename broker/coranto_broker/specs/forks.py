"""The rules for creating, changing and deleting forks and their sources by Apply. Pure.

The rules concern only journals with labels of forks (`coranto.fragments.forks`). A source promises to keep the
fragments that its forks share. So

* a journal is not deleted, and loses no hold, while the fork of the hold exists;
* a fork is created together with its source's hold and with all stores of its source, and both are kept;
* the labels of a fork never change, except that the state `forming` is removed;
* a fork shares only stored content of its source.

Readers of a fork read content of its source. So the creator of a fork must be allowed to read the source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from coranto import labels
from coranto.coordination.etcd import Compare, CompareTarget
from coranto.errors import InvalidInput, PermissionDenied, Unavailable
from coranto.fragments.forks import MAX_SHARES, Fork, fork_labels, fork_of, holds_of, is_held, is_label, shares_of
from coranto.security.tokens import Capability, Claims
from coranto.wire import protocol_pb2 as pb
from coranto.wire.heads_pb2 import JournalHead

if TYPE_CHECKING:
    from coranto_broker.replication.resolver import JournalState


def fork_guards(state: JournalState, request: pb.ApplyRequest, claims: Claims) -> list[Compare]:
    """Check the changes of forks and of sources as of `state`.

    Returns compares that fail if other journals that were checked have changed. Raises InvalidInput for a change that
    breaks a rule, and PermissionDenied for a fork of a journal that the caller may not read.
    """
    after = _After(state, request)
    for index, change in enumerate(request.changes):
        name = change.upsert.name if change.HasField("upsert") else change.delete
        item = state.item(name)
        if item is not None and 0 < change.expect_mod_revision < item.mod_revision:
            continue  # etcd rejects this change, since the caller's revision is outdated.
        before = item.spec if item is not None and _concerns_forks(item.spec) else None
        upsert = change.upsert if change.HasField("upsert") else None
        concerned = upsert is not None and _concerns_forks(upsert)
        if before is None and not concerned:
            continue
        try:
            if before is not None:
                _check_holds(after, before, upsert)
            if upsert is not None:
                _check_upsert(after, upsert, item.spec if item is not None else None, claims)
        except InvalidInput as error:
            raise InvalidInput(error.message, field=f"ApplyRequest.changes[{index}]") from None
    return after.compares


def new_shared_ends(state: JournalState, request: pb.ApplyRequest) -> dict[str, int]:
    """Return the sources of new forks, each with the end of the shared content."""
    ends: dict[str, int] = {}
    for change in request.changes:
        if state.item(change.upsert.name) is not None or not _concerns_forks(change.upsert):
            continue
        fork = fork_of(change.upsert)
        if fork is not None and fork.shares:
            ends[fork.source] = max(fork.shared_end, ends.get(fork.source, 0))
    return ends


def require_stored(ends: Mapping[str, int], heads: Mapping[str, JournalHead]) -> None:
    """Check that sources have stored all content that their new forks share.

    A fork that shares more would get content that is appended to its source later. Raises InvalidInput, or Unavailable
    if a head is not known now.
    """
    for name, end in sorted(ends.items()):
        head = heads.get(name)
        if head is not None and head.status == pb.SUSPENDED:
            stored = head.head
        elif head is not None and head.status == pb.OK and head.listed:
            stored = head.persisted_head
        else:
            problem = head.problem if head is not None else "no broker knows it"
            raise Unavailable(f"the stored part of {name}, the source of a fork, is unknown ({problem}); try again")
        if end > stored:
            raise InvalidInput(
                f"a fork of {name} cannot share its content up to {end}: its stores have it up to {stored}",
                field="ApplyRequest.changes",
            )


class _After:
    """The journals as they will be after the request. `compares` fail if a journal outside the request has changed."""

    def __init__(self, state: JournalState, request: pb.ApplyRequest) -> None:
        self._state = state
        self._changed = {change.upsert.name: change.upsert for change in request.changes if change.HasField("upsert")}
        self._deleted = {change.delete for change in request.changes if change.delete}
        self._compared: dict[str, Compare] = {}

    @property
    def compares(self) -> list[Compare]:
        return list(self._compared.values())

    def spec(self, name: str) -> pb.JournalSpec | None:
        if name in self._changed:
            return self._changed[name]
        if name in self._deleted:
            return None
        key = self._state.layout.item_key(name)
        entry = self._state.entries.get(key)
        revision = entry.kv.mod_revision if entry is not None else 0
        self._compared[key] = Compare(key, CompareTarget.MOD_REVISION, revision)
        item = self._state.item(name)
        return item.spec if item is not None else None


def _concerns_forks(spec: pb.JournalSpec) -> bool:
    return any(is_label(label.name) for label in spec.labels.labels)


def _check_holds(after: _After, before: pb.JournalSpec, upsert: pb.JournalSpec | None) -> None:
    """Check that a journal loses no hold for a fork that exists."""
    left = holds_of(upsert) if upsert is not None else {}
    for name, begin in _readable_holds(before):
        if is_held(left, name, begin):
            continue
        spec = after.spec(name)
        fork = _readable_fork(spec) if spec is not None else None
        if fork is None or fork.source != before.name:
            continue
        if upsert is None:
            raise InvalidInput(
                f"{before.name} cannot be deleted: its fork {name} shares its fragments. Drop the fork first "
                f"(coranto journals drop-fork {name})"
            )
        raise InvalidInput(
            f"{before.name} would no longer keep what its fork {name} shares: leave the label {labels.FORK_HOLD} = "
            f"{begin}/{name} as it is, or drop the fork first (coranto journals drop-fork {name})"
        )


def _readable_holds(spec: pb.JournalSpec) -> Iterator[tuple[str, int]]:
    """Yield the holds of a journal, or nothing if its labels are invalid. Coranto does not write such labels."""
    try:
        yield from sorted(holds_of(spec).items())
    except InvalidInput:
        return


def _readable_fork(spec: pb.JournalSpec) -> Fork | None:
    try:
        return fork_of(spec)
    except InvalidInput:
        return None


def _check_upsert(after: _After, upsert: pb.JournalSpec, before: pb.JournalSpec | None, claims: Claims) -> None:
    holds_of(upsert)
    fork = fork_of(upsert)
    if before is None:
        if fork is not None:
            _check_new(after, upsert, fork, claims)
        return
    if _readable_fork(before) is None:
        if fork is not None:
            raise InvalidInput(f"{upsert.name} already exists: a fork is a new journal; choose another name")
        return
    if _unchanging(upsert) != _unchanging(before) or _state(upsert) not in ("", _state(before)):
        raise InvalidInput(
            f"{upsert.name} is a fork, and its labels {labels.FORKS}… locate its content: leave them as they are"
        )
    _check_stores(upsert, before, "its")


def _check_new(after: _After, upsert: pb.JournalSpec, fork: Fork, claims: Claims) -> None:
    source = after.spec(fork.source)
    if source is None:
        raise InvalidInput(f"{fork.name} cannot be a fork of {fork.source}, which does not exist")
    if Capability.READ not in claims.capability or not claims.covers(fork.source, source.labels):
        raise PermissionDenied(
            f"a fork gives its readers the content of its source: to create {fork.name}, the token needs the "
            f"capabilities APPLY and READ over {fork.source} as well"
        )
    if sorted(_unchanging(upsert)) != sorted(fork_labels(replace(fork, forming=False))):
        raise InvalidInput(f"the labels {labels.FORKS}… of {fork.name} contradict each other, or are duplicates")
    above = fork_of(source)
    if any(share.journal == fork.name for share in shares_of(source, 0, fork.offset)):
        raise InvalidInput(f"{fork.name} cannot be a fork of its own fork {fork.source}")
    least = above.begin if above is not None else 0
    if not least <= fork.begin <= fork.shared_end <= fork.offset:
        raise InvalidInput(
            f"{fork.name} cannot share [{fork.begin}, {fork.shared_end}) of {fork.source} and diverge at {fork.offset}"
        )
    if fork.shares != shares_of(source, fork.begin, fork.shared_end):
        raise InvalidInput(f"{fork.name} does not share what its source {fork.source} has below {fork.shared_end}")
    if len(fork.shares) > MAX_SHARES:
        raise InvalidInput(
            f"{fork.name} would share fragments of {len(fork.shares)} journals, and {MAX_SHARES} is the limit: copy "
            "the content into a journal of its own"
        )
    if fork.shares and not is_held(holds_of(source), fork.name, fork.begin):
        raise InvalidInput(
            f"{fork.source} must keep what {fork.name} shares: give it the label {labels.FORK_HOLD} = "
            f"{fork.begin}/{fork.name} in the same call"
        )
    if upsert.suspend.offset < fork.shared_end:
        raise InvalidInput(f"{fork.name} must begin its own content at {fork.shared_end}: set suspend.offset to that")
    _check_stores(upsert, source, "its source's")


def _check_stores(upsert: pb.JournalSpec, before: pb.JournalSpec, whose: str) -> None:
    missing = sorted(set(before.fragment.stores) - set(upsert.fragment.stores))
    if missing:
        raise InvalidInput(
            f"{upsert.name} is a fork, and shared fragments may be in any of {whose} stores: keep {', '.join(missing)}"
        )


def _unchanging(spec: pb.JournalSpec) -> list[tuple[str, str]]:
    """Return the labels of a fork that never change: all except its state and the holds for its own forks."""
    changing = (labels.FORK_STATE, labels.FORK_HOLD)
    return [(each.name, each.value) for each in spec.labels.labels if is_label(each.name) and each.name not in changing]


def _state(spec: pb.JournalSpec) -> str:
    return labels.value_of(spec.labels, labels.FORK_STATE)
