"""Real brokers in the simulated world: seeds are sound and cover the interesting paths, planted bugs are caught."""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
import grpc.aio
import pytest

from coranto import labels
from coranto.client.append.stream import AppendStream, NotSent
from coranto.coordination.etcd import Delete
from coranto.coordination.layout import AssignmentKey
from coranto.fragments import stores
from coranto.fragments.journal_folders import MARKER, FolderListing, StoredFile
from coranto.specs.durability import Durability
from coranto.testing.sim.disk import ProcessDisk
from coranto.wire import protocol_pb2 as pb
from coranto.wire.append_stream_pb2 import AppendAnswer
from coranto_broker.append import decision
from coranto_broker.append import registers as of_registers
from coranto_broker.append.batch import Batch
from coranto_broker.append.decision import JournalSnapshot
from coranto_broker.append.queue import JournalQueue
from coranto_broker.append.queued_append import AppendOutcome, QueuedAppend
from coranto_broker.append.receiving import ContentStream
from coranto_broker.append.states import TRANSITIONS, AppendEvent, ProposalPath, State
from coranto_broker.fragments.backlog import Backlog
from coranto_broker.fragments.index import FragmentIndex
from coranto_broker.fragments.index_summary import IndexSummary
from coranto_broker.fragments.persister import FragmentPersister, _Reading
from coranto_broker.recovery import residence, spool_recovery
from coranto_broker.recovery.adoption import Adoption
from coranto_broker.recovery.identity import ClusterIdentity
from coranto_broker.recovery.in_sync_records import InSyncRecords
from coranto_broker.replication.pipeline import Pipeline
from coranto_broker.spool import commit_check, in_sync
from coranto_broker.spool.durable_spool import DurableSpool, Fsync, SpoolFolder
from coranto_broker.spool.flush import Flusher
from coranto_broker.spool.in_sync import Judgement, Takeover
from coranto_broker.spool.recovery import Recovered
from coranto_broker.spool.shared_file import SharedFile
from coranto_broker.spool.spool import ProposalDecision, ProposalEffect, Spool
from tests.sampling import sampled
from tests.simulation.broker.options import DEMANDS, FAULTS, options_of
from tests.simulation.broker.run import RunReport, run
from tests.simulation.broker.world import LAYOUT, World

from .coverage import finds_anomaly, missing, seeds_until

SEEDS = 60

INTERESTING = {
    *(f"fault: {fault}" for fault in FAULTS),
    "a broker exited gracefully",
    "a broker lost its lease or etcd",
    "a bit was flipped in a fragment that was about to be stored",
    "a broker refused an etcd that does not go with its disk",
    "a client went away during its commit",
    "a lease ran out",
    "appends that were given together committed in their order",
    "one of several appends was given up",
    "an append was aborted mid-stream",
    "an etcd that was restored was adopted",
    "an unknown append was applied",
    "an unknown append was not applied",
    *(f"append was proposed: {path.value}" for path in ProposalPath),
    "append: AppendOutcomeUnknown",
    "append: RegisterMismatch",
    "append: Unavailable",
    "append: WrongAppendOffset",
    "etcd was emptied",
    "etcd was restored from a backup",
    "disk: a write was cut short by a kill",
    "disk: a write was dropped by a sync that failed",
    "disk: a write was lost with the machine",
    "disk: a write was refused, the disk being full",
    "disk: a write was torn with the machine",
    "network: a message was held",
    "store: a call was applied and failed",
    "store: a call was refused",
    "store: a call was refused, being of a fragment",
    "store: a call was slow",
    "the allocator removed an assignment",
    "log: allocator.conflict",
    "log: backlog.journal_released",
    "log: backlog.journal_held_back",
    "log: in_sync.closed",
    "log: fragment.set_aside",
    "log: fragment.storing_failed",
    "log: fragment.mended",
    "log: replica.pulse_failed",
    "log: keyspace.reload",
    "log: lease.lost",
    "log: lease.resumed",
    "log: in_sync.left",
    "log: folder.nested_journal_skipped",
    "log: orphaned_spool.rescued",
    "log: spool.unreadable",
    "log: spool.sync_failed",
    "log: spool.set_aside",
    "log: store.listing_failed",
    "log: orphaned_spool.taken_up",
    "log: spool.taken_up",
}
"""Paths that some run must take, so that the others prove something."""


TAKEN: set[tuple[State, AppendEvent]] = set()
"""Transitions of the append state machine that some run of this process has taken."""

OPERATORS = {
    (State.RESOLVE, AppendEvent.SUSPENSION_MUST_CHANGE),  # A full suspension ends.
    (State.VALIDATE_PRECONDITIONS, AppendEvent.MUST_ROLL),  # A roll to an explicit offset.
    (
        State.VALIDATE_PRECONDITIONS,
        AppendEvent.ETCD_CHANGED,
    ),  # Replicas could not be recorded after a confirmed loss.
    (State.STREAM_CONTENT, AppendEvent.LOSS_CONFIRMED),  # A loss is confirmed.
}
"""Transitions that need an operator. Runs have none; `tests/broker/append/test_fsm.py` covers these transitions."""


@functools.cache
def report_of(seed: int) -> RunReport:
    real = QueuedAppend.transition

    def noted(self: QueuedAppend, event: AppendEvent) -> None:
        TAKEN.add((self.state, event))
        real(self, event)

    with patch.object(QueuedAppend, "transition", noted):
        return run(options_of(seed))


@pytest.mark.parametrize("seed", sampled(range(SEEDS), 3))
def test_seed(seed: int) -> None:
    report = report_of(seed)
    assert report.sound, f"\n{report}"


def test_the_seeds_cover_the_interesting_paths() -> None:
    transitions = {each for each, following in TRANSITIONS.items() if following is not State.ERROR} - OPERATORS
    wanted = dict.fromkeys([*INTERESTING, *map(str, transitions)], 1)
    coverage: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    for seed in seeds_until(SEEDS, coverage, wanted):
        report = report_of(seed)
        assert report.sound, f"\n{report}"
        coverage += report.coverage
        coverage.update(dict.fromkeys(map(str, TAKEN), 1))
        outcomes += report.outcomes
    assert missing(coverage, wanted) == {}
    # About half of the appends must succeed, or runs would prove little about acknowledged ones. After a cut, all
    # appends of a stream are unknown.
    assert outcomes["append ok"] > 0.75 * sum(outcomes[f"append {outcome}"] for outcome in ("fail", "info"))


def test_a_run_is_reproducible_in_another_process() -> None:
    code = (
        "from tests.simulation.broker.options import options_of\n"
        "from tests.simulation.broker.run import run\n"
        "report = run(options_of(7))\n"
        "print(report.digest, report.steps)\n"
    )
    there = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=Path(__file__).parents[2],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for hash_seed in ("1", "2")
    ]
    here = report_of(7)
    assert there == [f"{here.digest} {here.steps}"] * 2
    assert report_of(8).digest != here.digest


def test_a_failure_prints_its_replay_command() -> None:
    report = run(options_of(3), prepare=lambda world: world.problems.append("made up"))
    assert not report.sound
    assert "python -m tests.simulation.broker --seed 3" in str(report)
    assert "fragment_length=" in str(report)


def test_appends_share_streams_in_most_runs() -> None:
    shared = sum(options_of(seed).append_streams for seed in range(SEEDS))
    assert SEEDS // 2 < shared < SEEDS * 9 // 10


# -- Planted bugs: each of these brokers has one bug, and the checker names its effect --------------------------------


def is_caught(*names: str, first: int = 0, **options: Any) -> bool:
    given = {"seconds": 10.0, "appends": 15} | options
    return finds_anomaly(names, lambda seed: run(options_of(seed, **given)), first)


POWER: dict[str, Any] = {"brokers": 1, "replication": 1, "fsync": Fsync.COMMIT, "lease_seconds": 10.0}


STREAMS: dict[str, Any] = {"append_streams": True, "shuffle": False, "brokers": 3, "replication": 3}


def test_a_queue_that_reorders_appends_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = JournalQueue._commit_next

    async def commit_reversed(queue: JournalQueue, head: QueuedAppend) -> None:
        queue._waiting = dict(reversed(queue._waiting.items()))
        await real(queue, next(iter(queue._waiting)))

    monkeypatch.setattr(JournalQueue, "_commit_next", commit_reversed)
    assert is_caught("out-of-order", faults=(), **STREAMS)


def test_a_batch_that_stays_in_the_queue_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = JournalQueue._take

    def take(queue: JournalQueue, batch: Batch, *arguments: Any) -> None:
        waiting = dict(queue._waiting)
        for append in waiting:  # Otherwise the state machine would reject a second proposal.
            append.state = State.ACQUIRE_PIPELINE
        real(queue, batch, *arguments)
        if len(batch.members) > 1:  # Its last append remains.
            last = batch.members[-1][0]
            queue._waiting = {append: None for append in waiting if append is last or append in queue._waiting}

    monkeypatch.setattr(JournalQueue, "_take", take)
    assert is_caught("duplicate", "lost-write", "out-of-order", "inconsistent-offsets", faults=(), **STREAMS)


def test_a_batch_that_swaps_the_answers_of_its_members_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Batch._outcomes

    def outcomes(batch: Batch, durability: Durability) -> list[tuple[QueuedAppend, AppendOutcome]]:
        places = [place for _, place in reversed(batch.members)]
        batch.members = [(append, place) for (append, _), place in zip(batch.members, places, strict=True)]
        return real(batch, durability)

    monkeypatch.setattr(Batch, "_outcomes", outcomes)
    report = run(options_of(0, faults=(), seconds=10.0, appends=15, **STREAMS))
    assert any("were sent, but the broker has" in problem for problem in report.problems), "its client compares them"


def test_an_answer_to_another_append_of_the_stream_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = AppendStream._answered

    def swapped(stream: AppendStream, answer: AppendAnswer) -> None:
        answer.id = next(reversed(stream._sent), answer.id)
        real(stream, answer)

    monkeypatch.setattr(AppendStream, "_answered", swapped)
    report = [run(options_of(seed, faults=(), seconds=10.0, **STREAMS)) for seed in range(4)]
    assert any(not each.sound for each in report)


def test_a_broken_stream_that_says_nothing_was_sent_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    async def append(stream: AppendStream, *args: Any) -> bytes:
        try:
            return await real(stream, *args)
        except grpc.aio.AioRpcError as error:
            raise NotSent("it was") from error

    real = AppendStream.append
    monkeypatch.setattr(AppendStream, "append", append)
    assert is_caught("aborted-read", faults=("break calls",), **STREAMS)


def test_a_check_of_the_last_commit_record_alone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_check, "_longest", lambda records, *_: (min(records), None))
    assert is_caught("stuck", "lost-write", faults=("crash machine",), **POWER)


def test_a_sync_trusted_after_a_failed_one_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def sync(self: SharedFile) -> None:
        self._open().sync()

    monkeypatch.setattr(SharedFile, "sync", sync)
    monkeypatch.setattr(SpoolFolder, "distrust", lambda *_: None)
    for name in ("require_sound", "_report_failure"):
        monkeypatch.setattr(Flusher, name, lambda *_: None)
    assert is_caught("under-replicated-ack", faults=("disk fails",), **POWER)


def test_unsynced_folders_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessDisk, "sync_folder", lambda *_: None)
    assert is_caught("under-replicated-ack", faults=(), **POWER)


def test_a_replica_that_answers_before_its_sync_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    async def flush_nothing(self: DurableSpool) -> None:
        return None

    monkeypatch.setattr(DurableSpool, "flush_commits", flush_nothing)
    assert is_caught("under-replicated-ack", faults=(), **POWER | {"brokers": 3, "replication": 3})


SURVIVES: dict[str, Any] = {"brokers": 3, "zones": 2, "replication": 2, "journals": 1, "fsync": Fsync.NEVER}


def test_the_reported_durability_of_appends_holds() -> None:
    """Each demand is met while brokers come and go, and clients learn of more durability than at first."""
    wanted = dict.fromkeys(
        (
            "an append was told to be on disks",
            "an append survived what its client waited for",
            "an append was acknowledged below its demand",
        ),
        1,
    )
    coverage: Counter[str] = Counter()
    for seed in seeds_until(len(DEMANDS), coverage, wanted):
        durability = list(DEMANDS)[seed % len(DEMANDS)]
        report = run(options_of(seed, durability=durability, faults=("long outage", "kill", "cut store"), **SURVIVES))
        assert report.sound, f"\n{report}"
        coverage += report.coverage
    assert missing(coverage, wanted) == {}


def test_acknowledgements_that_claim_an_unsynced_disk_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DurableSpool, "is_on_disk", lambda *_: True)
    assert is_caught("overclaimed-ack", durability="zones", faults=(), **SURVIVES)


def test_completed_fragments_claimed_as_synced_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    async def force(spool: DurableSpool, *_: SharedFile) -> None:
        await spool.flush()

    monkeypatch.setattr(DurableSpool, "force", force)
    monkeypatch.setattr(Flusher, "retire", lambda *_: None)
    options = SURVIVES | {"fragment_length": 1024}
    assert is_caught("overclaimed-ack", durability="zones", faults=("store refuses fragments",), **options)


def test_later_replicas_counted_for_durability_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FragmentIndex, "held_from", lambda *_: (0, []))
    options = SURVIVES | {"brokers": 4, "replication": 2, "lease_seconds": 3.0}
    faults = ("long outage", "store refuses fragments")
    assert is_caught("overclaimed-ack", first=406, durability="zones or less", faults=faults, **options)


def test_acknowledgements_below_the_demand_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pipeline, "adopt_demand", lambda *_: None)
    assert is_caught("below-demand-ack", durability="zones", faults=("long outage",), **SURVIVES)


def test_offsets_assigned_twice_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    # A broker that loses its spool when it is killed, and does not ask the store for the journal's end.
    real = decision._check

    def forget(folder: SpoolFolder, *, distrusted: bool) -> Recovered:
        return Recovered(Spool(folder.journal))

    def check_nothing(request: pb.AppendRequest, snapshot: JournalSnapshot) -> object:
        return real(request, replace(snapshot, known=IndexSummary()))

    monkeypatch.setattr(spool_recovery, "recover", forget)
    monkeypatch.setattr(decision, "_check", check_nothing)
    monkeypatch.setattr(in_sync, "is_complete", lambda *_: True)
    assert is_caught("inconsistent-offsets", "duplicate", brokers=1, replication=1, faults=("kill",))


def test_acknowledgements_without_replicas_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    # A primary that does not wait for its replicas.
    async def gather_nothing(self: Pipeline, proposal: object, since: int | None = None) -> Durability:
        self.spool.publish(self.spool.fragment)
        return Durability(3, 1)

    monkeypatch.setattr(Pipeline, "gather_ok", gather_nothing)
    assert is_caught("under-replicated-ack", brokers=3, replication=3, faults=("cut brokers",), congestion=0.1)


def test_a_spool_without_a_commit_log_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DurableSpool, "_record", lambda self, committed, **_: None)
    assert is_caught("under-replicated-ack", brokers=1, replication=1, faults=())


def test_visible_content_of_aborted_appends_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    # A broker that commits when a client's stream ends without a commit.
    def commit_anyway(self: ContentStream) -> None:
        return

    monkeypatch.setattr(ContentStream, "client_ended", commit_anyway)
    assert is_caught("aborted-read", "torn-append", brokers=3, replication=1, faults=("break calls",))


def test_registers_that_drift_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    # A broker that sometimes clears the registers after an append.
    calls = 0
    real = of_registers.after

    def forgetful(request: pb.AppendRequest, registers: pb.LabelSet) -> pb.LabelSet:
        nonlocal calls
        calls += 1
        return labels.label_set() if calls % 7 == 0 else real(request, registers)

    monkeypatch.setattr(of_registers, "after", forgetful)
    assert is_caught("register-drift", brokers=3, replication=3, faults=())


def test_a_diverged_replica_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    # A disk that sometimes changes a byte.
    calls = 0
    real = SharedFile.write_at

    def misremember(self: SharedFile, position: int, data: bytes) -> None:
        nonlocal calls
        calls += 1
        if calls % 40 == 0 and self.path.suffix == ".content":
            data = data[:-1] + b"?"
        real(self, position, data)

    monkeypatch.setattr(SharedFile, "write_at", misremember)
    assert is_caught("diverged-replica", "under-replicated-ack", brokers=3, replication=3, faults=())


def test_use_of_diverged_spools_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    # Brokers that trust, serve and store any content on their disks.
    def final(*_: object) -> Judgement:
        return Judgement.FINAL

    monkeypatch.setattr(in_sync, "judge", final)
    monkeypatch.setattr(spool_recovery, "judge", final)
    faults = ("kill", "long pause", "long outage", "cut brokers", "cut one way", "cut etcd", "break calls")
    options: dict[str, Any] = {"brokers": 3, "replication": 2, "journals": 1, "lease_seconds": 3.0, "congestion": 0.1}
    assert is_caught(
        "inconsistent-offsets",
        "diverged-fragment",
        "diverged-replica",
        first=5,
        faults=faults,
        **options | {"seconds": 30.0, "appends": 30},
    )


def test_a_takeover_without_acknowledged_content_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    # Primaries that continue with any replicas. Two then write at the same offsets, or readers wait at a gap.
    monkeypatch.setattr(in_sync, "takeover", lambda *_: Takeover.CLEAN)
    options: dict[str, Any] = {"brokers": 3, "replication": 1, "lease_seconds": 3.0}
    assert is_caught("lost-write", "stuck", "unseen", faults=("long outage", "long pause"), **options)


def test_replicas_that_serve_content_missing_on_others_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    # Replicas that serve content once it has committed locally, as Gazette's do.
    real = DurableSpool.propose

    def show(self: DurableSpool, *arguments: Any, **options: Any) -> ProposalDecision:
        decision = real(self, *arguments, **options)
        if decision.effect is ProposalEffect.COMMIT and not options["primary"]:
            self.publish(decision.committed.fragment)
        return decision

    in_one_go = DurableSpool.commit_proposed

    def show_in_one_go(self: DurableSpool, content: bytes, proposal: pb.Fragment, revision: int) -> bool:
        committed = in_one_go(self, content, proposal, revision)
        if committed:
            self.publish(self.fragment)
        return committed

    def plant(world: World) -> None:
        async def lose() -> None:
            """Cut one replica off from the primary, then end all others, and let that one continue."""
            journal = world.journals[0]
            await world.until(lambda: world.is_consistent(journal), 30.0)
            await asyncio.sleep(5.0)
            primary, *others = [world.machine_of(key.member) for key, _ in sorted(world.assignments(journal), key=slot)]
            restore = world.network.cut_both(primary.name, others[0].name)
            await asyncio.sleep(1.5)
            for machine in (primary, *others[1:]):
                machine.end()
            restore()
            await asyncio.sleep(2 * world.options.lease_seconds)
            for machine in (primary, *others[1:]):
                machine.stays_down = False
                machine.boot(0.0)

        world.clients.start(lose())

    def slot(assignment: tuple[AssignmentKey, object]) -> int:
        return assignment[0].slot

    def found() -> list[str]:
        options: dict[str, Any] = {"brokers": 5, "replication": 3, "journals": 1, "readers": 6, "lease_seconds": 3.0}
        reports = [run(options_of(seed, faults=("compact",), **options), prepare=plant) for seed in range(4)]
        return [anomaly.name for report in reports for anomaly in report.anomalies]

    assert found() == []
    monkeypatch.setattr(DurableSpool, "propose", show)
    monkeypatch.setattr(DurableSpool, "commit_proposed", show_in_one_go)
    assert "inconsistent-offsets" in found()


def test_brokers_that_do_not_record_their_end_offsets_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    async def leave_nothing(*_: object) -> None:
        return None

    monkeypatch.setattr(InSyncRecords, "leave", leave_nothing)
    assert is_caught("stuck", brokers=3, replication=2, faults=(), stored_at_end=True)


def test_listings_that_include_subfolders_of_other_journals_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    # A broker that takes all files below a journal's folder as its own, as Gazette's do.
    real = stores.assign_files

    def take_all(
        journal: str, files: Iterable[StoredFile], names: Iterable[str], *, backing_store: str
    ) -> FolderListing:
        unmarked = [file for file in files if not file.path.endswith(MARKER)]
        return real(journal, unmarked, (), backing_store=backing_store)

    monkeypatch.setattr(stores, "assign_files", take_all)
    options: dict[str, Any] = {"brokers": 3, "replication": 1, "journals": 2, "fragment_length": 1024}
    found = ("lost-write", "inconsistent-offsets", "torn-append")
    # In most runs, journals only get stuck.
    assert is_caught(*found, first=16, nested=True, faults=("kill",), **options)


def test_stored_damaged_content_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    # A broker that stores the disk's content without a check of its SHA-1.
    monkeypatch.setattr(_Reading, "_finish", lambda self: self._compressor.finish())
    options: dict[str, Any] = {"brokers": 3, "replication": 3, "fragment_length": 1024}
    assert is_caught("corrupt-fragment", "stuck", faults=("flip a bit",), **options)


def test_discarded_damaged_content_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    # A broker that detects damage, but neither asks other brokers nor waits until one of them has stored the fragment.
    def drop(self: FragmentPersister, job: Any, error: Exception) -> None:
        job.sealed.drop()

    monkeypatch.setattr(FragmentPersister, "_found_damaged", drop)
    options: dict[str, Any] = {"brokers": 3, "replication": 3, "fragment_length": 1024, "stored_at_end": False}
    assert is_caught("stuck", "unseen", first=16, faults=("flip a bit",), **options)


def test_unbounded_spools_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    # A broker that never delays appends.
    monkeypatch.setattr(Backlog, "problem", lambda *_: "")
    options: dict[str, Any] = {"brokers": 3, "journals": 1, "fragment_length": 1024, "appends": 30}
    assert is_caught("unbounded-backlog", replication=1, faults=("store refuses fragments",), **options)


RESTORED: dict[str, Any] = {
    "brokers": 1,
    "replication": 1,
    "fragment_length": 1 << 20,
    "faults": ("restore etcd", "cut store"),
}


def test_brokers_that_trust_any_etcd_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    # They serve with any etcd, and do not restore its missing state.
    async def nothing(*_: object) -> str:
        return ""

    async def do_nothing(*_: object) -> None:
        return None

    monkeypatch.setattr(residence, "differences", lambda *_: ())
    monkeypatch.setattr(residence.Residence, "_forgotten", nothing)
    monkeypatch.setattr(Adoption, "gather", do_nothing)
    monkeypatch.setattr(Adoption, "finish", do_nothing)
    # A spool with a later revision than etcd's makes its broker wait, so that at least journals are stuck.
    assert is_caught("lost-write", "inconsistent-offsets", "stuck", **RESTORED)


def test_revisions_used_twice_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    # Brokers that do not raise the base revision. Earlier stamps and records then seem to be later than new ones.
    real_join, real_use = Adoption._join, Adoption._use

    async def join(
        self: Adoption, seen: int, former: str, change: Callable[[ClusterIdentity], ClusterIdentity]
    ) -> ClusterIdentity:
        return await real_join(self, 0, former, lambda found: replace(change(found), base=0))

    async def use(self: Adoption, *arguments: Any) -> None:
        await real_use(self, *arguments[:-1], 0)

    monkeypatch.setattr(Adoption, "_join", join)
    monkeypatch.setattr(Adoption, "_use", use)
    options = RESTORED | {"faults": ("restore etcd", "cut store", "kill")}
    assert is_caught("stuck", "lost-write", "inconsistent-offsets", first=24, **options)


def test_an_unsafe_removal_of_an_assignment_is_caught() -> None:
    def plant(world: World) -> None:
        async def remove() -> None:
            await asyncio.sleep(5)
            keys = [kv.key for kv in world.etcd.prefixed(LAYOUT.assignments_of(world.journals[0]))]
            world.etcd.txn([], [Delete(keys[0])], [])

        world.clients.start(remove())

    report = run(options_of(0, brokers=3, replication=3, faults=()), prepare=plant)
    assert [anomaly.name for anomaly in report.anomalies] == ["unsafe-removal"]
