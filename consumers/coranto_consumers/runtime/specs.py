"""Shard specs and the other entities of consumers in etcd: their validation, and values derived from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from coranto import labels
from coranto.coordination.entities import ProcessEntities, parse, require_own
from coranto.coordination.layout import AssignmentKey, MemberId
from coranto.errors import InvalidInput
from coranto.names import is_clean_path, validate_journal, validate_process_id, validate_shard_id
from coranto.specs.validation import ANY_REVISION, duration_seconds, validate_endpoint
from coranto.wire import consumer_pb2 as pc
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.recoverylog.hint_store import HintKeys, require_no_cluster_keys

MAX_SHARD_LIMIT = 131_072
MAX_HOT_STANDBYS = 3
"""The default limit for the hot standbys of every shard."""
MAX_HINT_BACKUPS = 64
"""The maximum number of backups of hints. Each is an etcd key that is read at every recovery of the shard."""

ValueT = TypeVar("ValueT")


def validate_shard_spec(spec: pc.ShardSpec) -> None:
    """Raise InvalidInput, which names the field, for a spec that is not valid."""
    _named("id", validate_shard_id, spec.id)
    if spec.recovery_log_prefix:
        _named("recovery_log_prefix", validate_journal, recovery_log(spec))
        prefix = spec.hint_prefix
        if not prefix.startswith("/") or prefix.endswith("/") or not is_clean_path(prefix[1:]):
            raise InvalidInput(
                f"{prefix!r} must be an absolute, clean path without a slash at its end, such as /hints/app: "
                "a recovery log needs a place for its hints",
                field="hint_prefix",
            )
    elif spec.hint_prefix:
        raise InvalidInput("hints are of a recovery log; set recovery_log_prefix too", field="hint_prefix")
    if not 0 <= spec.hint_backups <= MAX_HINT_BACKUPS:
        raise InvalidInput(
            f"{spec.hint_backups} is not between 0 and {MAX_HINT_BACKUPS}; choose a number that is",
            field="hint_backups",
        )
    minimum, maximum = duration_seconds(spec.min_txn_duration), duration_seconds(spec.max_txn_duration)
    if minimum < 0:
        raise InvalidInput(f"{minimum:g} s is below 0; give 0s or more", field="min_txn_duration")
    if maximum <= 0:
        raise InvalidInput(f"{maximum:g} s is not above 0; 1s is a usual value", field="max_txn_duration")
    _within("labels", _validate_labels, spec.labels)
    for index, source in enumerate(spec.sources):
        _named(f"sources[{index}].journal", validate_journal, source.journal)
        if source.min_offset < 0:
            raise InvalidInput(f"{source.min_offset} is below 0; give 0 or more", field=f"sources[{index}].min_offset")
        if index and spec.sources[index - 1].journal >= source.journal:
            raise InvalidInput(
                f"{source.journal} does not sort after {spec.sources[index - 1].journal}; "
                "sources must be sorted by journal, each given once",
                field=f"sources[{index}].journal",
            )


def _validate_labels(found: pb.LabelSet) -> None:
    labels.validate_label_set(found)
    for name in labels.SINGLE_VALUED:
        if len(values := labels.values_of(found, name)) > 1:
            raise InvalidInput(f"{name} has the values {', '.join(values)}, but may have only one; keep one of them")
    if labels.values_of(found, "id"):
        raise InvalidInput("the label `id` stands for the shard's id, and cannot be given; leave it out")


def validate_consumer_spec(spec: pc.ConsumerSpec) -> None:
    """Raise InvalidInput, which names the field, for a spec that is not valid."""
    _within("process_spec.id", validate_process_id, spec.process_spec.id)
    _named("process_spec.endpoint", validate_endpoint, spec.process_spec.endpoint)
    if spec.shard_limit > MAX_SHARD_LIMIT:
        raise InvalidInput(f"{spec.shard_limit} is above {MAX_SHARD_LIMIT}; give at most that", field="shard_limit")


def validate_status(status: pc.ReplicaStatus) -> None:
    """Raise InvalidInput for a status that is not valid. The code FAILED, and no other, has errors."""
    if status.code not in pc.ReplicaStatus.Code.values():
        raise InvalidInput(f"{status.code} is not the code of a replica; use one of ReplicaStatus.Code", field="code")
    if bool(status.errors) != (status.code == pc.ReplicaStatus.FAILED):
        raise InvalidInput("the code FAILED needs errors, and errors need the code FAILED", field="errors")


def validate_change(change: pc.ApplyRequest.Change) -> None:
    """Raise InvalidInput, which names the field, for a change that is not valid."""
    if change.expect_mod_revision < ANY_REVISION:
        raise InvalidInput(
            f"{change.expect_mod_revision} is below -1; give the shard's revision, 0 for a new shard, or -1 for any",
            field="expect_mod_revision",
        )
    if change.HasField("upsert") == bool(change.delete):
        raise InvalidInput("give either upsert or delete", field="upsert")
    if change.HasField("upsert"):
        _within("upsert", validate_shard_spec, change.upsert)
        # This is not checked with the spec itself, so that stored specs can still be read.
        _within("upsert", require_no_cluster_keys, change.upsert.hint_prefix)
        if change.HasField("primary_hints") and not change.upsert.recovery_log_prefix:
            raise InvalidInput(
                "the shard has no recovery log that hints could be of; set recovery_log_prefix, or leave the hints out",
                field="primary_hints",
            )
        return
    _named("delete", validate_shard_id, change.delete)
    if change.expect_mod_revision == 0:
        raise InvalidInput("a deletion needs the shard's revision, or -1", field="expect_mod_revision")
    if change.HasField("primary_hints"):
        raise InvalidInput("a deletion takes no hints; leave them out", field="primary_hints")


def replication(spec: pc.ShardSpec, max_hot_standbys: int = MAX_HOT_STANDBYS) -> int:
    """Return the number of processes for the shard: the primary and its hot standbys. 0 for a disabled shard."""
    return 0 if spec.disable else 1 + min(spec.hot_standbys, max_hot_standbys)


def recovery_log(spec: pc.ShardSpec) -> str:
    """Return the journal of the shard's recovery log, or "" when it has none."""
    return f"{spec.recovery_log_prefix}/{spec.id}" if spec.recovery_log_prefix else ""


def hint_keys(spec: pc.ShardSpec) -> HintKeys:
    """Return the keys of the hints of a shard with a recovery log."""
    return HintKeys(spec.hint_prefix, spec.id, spec.hint_backups)


def exclusive(spec: pc.ShardSpec) -> tuple[str, ...]:
    """Return descriptions of the things that no two shards may share: the recovery log, and the key of its hints.

    Ids may hold slashes, so prefix `logs` with id `app/sums-000` gives the same log as `logs/app` with `sums-000`.
    """
    if not spec.recovery_log_prefix:
        return ()
    return f"the recovery log {recovery_log(spec)}", f"the hints at {hint_keys(spec).primary}"


def with_meta(spec: pc.ShardSpec) -> pb.LabelSet:
    """Return the shard's labels, with `id` added for selectors."""
    return labels.add_value(spec.labels, "id", spec.id)


def most_advanced(statuses: Sequence[pc.ReplicaStatus]) -> pc.ReplicaStatus:
    """Return one status for all replicas of a shard: the highest code, and all errors. IDLE without replicas."""
    merged = pc.ReplicaStatus()
    for status in statuses:
        if status.code > merged.code:
            merged.code = status.code
        merged.errors.extend(status.errors)
    return merged


class ShardEntities(ProcessEntities):
    """Shards, consumer processes and the statuses of replicas, for the key space and the allocator."""

    def __init__(self, *, max_hot_standbys: int = MAX_HOT_STANDBYS) -> None:
        self._max_hot_standbys = max_hot_standbys

    def decode_item(self, item: str, value: bytes) -> pc.ShardSpec:
        spec = parse(pc.ShardSpec(), value)
        validate_shard_spec(spec)
        if spec.id != item:
            raise InvalidInput(f"the spec is of shard {spec.id!r}, but its key is of {item!r}", field="ShardSpec.id")
        return spec

    def decode_member(self, member: MemberId, value: bytes) -> pc.ConsumerSpec:
        spec = parse(pc.ConsumerSpec(), value)
        validate_consumer_spec(spec)
        return require_own(spec, member)

    def decode_assignment(self, key: AssignmentKey, value: bytes) -> pc.ReplicaStatus:
        """Decode a status. An empty value is IDLE."""
        status = parse(pc.ReplicaStatus(), value)
        validate_status(status)
        return status

    def replication(self, item: pc.ShardSpec) -> int:
        return replication(item, self._max_hot_standbys)

    def item_limit(self, member: pc.ConsumerSpec) -> int:
        return member.shard_limit

    def consistent(self, assignments: Sequence[tuple[AssignmentKey, pc.ReplicaStatus]]) -> Sequence[bool]:
        """Return, for each assignment, True if its replica is ready to take over.

        Failed replicas count as ready once the primary has failed too: nothing is lost by moving them then.
        """
        failed = any(key.slot == 0 and status.code == pc.ReplicaStatus.FAILED for key, status in assignments)
        ready = (pc.ReplicaStatus.STANDBY, pc.ReplicaStatus.PRIMARY)
        return [
            status.code in ready or (failed and status.code == pc.ReplicaStatus.FAILED) for _, status in assignments
        ]


def _within(field: str, check: Callable[[ValueT], object], value: ValueT) -> None:
    try:
        check(value)
    except InvalidInput as error:
        raise error.within(field) from None


def _named(field: str, check: Callable[[str], object], value: str) -> None:
    """Run `check` like `_within`, but replace the field that the check names."""
    try:
        check(value)
    except InvalidInput as error:
        raise InvalidInput(error.message, field=field) from None
