"""Journals of real brokers in files and in S3, with one replica and with three, and their checks in Dagster."""

from __future__ import annotations

import hashlib
import itertools
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import dagster as dg

from coranto.audit import AuditOptions, Depth, Report, audit_journals
from coranto.client import JournalClient, JournalInfo, SyncJournalClient
from coranto.client.loop import run_blocking
from coranto.cluster import EmbeddedCluster
from coranto.fragments.fragment import Fragment
from coranto.fragments.stores import FragmentStore, StoreRegistry
from coranto.recovery import JournalsRecovery, MoreDoctors, NotApproved
from coranto.wire import protocol_pb2 as pb
from dagster_coranto import JournalGroup, JournalResource, build_journal_recovery, build_verification
from dagster_coranto.verification.checks import MoreChecks, as_result
from dagster_coranto.verification.recovery import plan_metadata, recovery_metadata
from tests.faults.links import ProxiedLink, Proxy
from tests.orchestration.metadata import without_namespace
from tests.servers.s3 import S3Server

BROKERS: Final = 3
BUCKET: Final = "damage"
SIZE: Final = 3000
STORED: Final = 4
"""The number of fragments of each journal in its store. One more is on the brokers' disks."""
KINDS: Final = [(store, replication) for store in ("file", "s3") for replication in (1, 3)]
PAIRS: Final = (KINDS[::3], KINDS[1:3])
TIMEOUT_S: Final = 120.0
_QUIET: Final = {"loggers": {"console": {"config": {"log_level": "ERROR"}}}}


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a check."""

    passed: bool
    kinds: frozenset[str] = frozenset()
    findings: str = ""


@dataclass(frozen=True, slots=True)
class Planned:
    """The metadata of a plan, or of a recovery."""

    succeeded: bool
    metadata: dict[str, Any]

    @property
    def hash(self) -> str:
        return str(self.metadata.get("hash", ""))

    @property
    def steps(self) -> Counter[str]:
        """The number of steps of each kind."""
        rows: Any = self.metadata["steps"]
        return Counter(str(each.data["kind"]) for each in rows.records)

    @property
    def gone(self) -> str:
        return str(self.metadata.get("gone_for_good", ""))

    @property
    def kept(self) -> str:
        return str(self.metadata.get("lost_unless_you_act", ""))

    @property
    def left_alone(self) -> str:
        return str(self.metadata.get("left_alone", ""))


class Place:
    """The cluster, its stores, and methods that damage them."""

    def __init__(self, cluster: EmbeddedCluster, s3: S3Server, gate: Proxy, link: ProxiedLink) -> None:
        self.cluster, self.s3, self.gate, self.link = cluster, s3, gate, link
        self.client = SyncJournalClient(
            ",".join(cluster.info.endpoints), file_root=cluster.file_root, timeout=TIMEOUT_S, retry_timeout=60
        )
        self._replicas: dict[str, SyncJournalClient] = {}
        self.instance = dg.DagsterInstance.ephemeral()

    def url(self, store: str, folder: str) -> str:
        """Return the URL of a store; `folder` is empty or ends in a slash."""
        if store == "file":
            return f"file:///{folder}"
        return self.s3.store_url(BUCKET, folder, endpoint=f"http://{self.gate.endpoint}")

    def fragment(self, store: str = "file:///") -> pb.JournalSpec.Fragment:
        fragment = pb.JournalSpec.Fragment(length=1024, compression_codec=pb.NONE, stores=[store])
        fragment.refresh_interval.FromSeconds(1)
        return fragment

    def create_others(self) -> None:
        """Create journals outside of all rows that use the same stores."""
        specs = [
            pb.JournalSpec(name=f"others/{store}", replication=1, fragment=self.fragment(self.url(store, "")))
            for store in ("file", "s3")
        ]
        self.client.apply([pb.ApplyRequest.Change(upsert=spec) for spec in specs])

    def wipe(self, number: int) -> None:
        """Remove the disk of a stopped broker."""
        shutil.rmtree(self.cluster.data_dir / "brokers" / f"broker-{number}")

    def replica(self, endpoint: str) -> SyncJournalClient:
        """Return a client of one broker, for the view of that broker."""
        if endpoint not in self._replicas:
            self._replicas[endpoint] = SyncJournalClient(endpoint, route_cache=0)
        return self._replicas[endpoint]

    def close(self) -> None:
        for each in (self.client, *self._replicas.values()):
            each.close()
        self.instance.dispose()


class Journal:
    """One journal of a row."""

    def __init__(self, place: Place, name: str, folder: str, store: str, replication: int) -> None:
        self.place, self.client, self.name = place, place.client, name
        self.replication = replication
        self.is_file = store == "file"
        self.url = place.url(store, folder)
        self.store: FragmentStore = StoreRegistry(place.cluster.file_root).get(self.url)
        self.head = 0

    def spec(self) -> pb.JournalSpec:
        return pb.JournalSpec(name=self.name, replication=self.replication, fragment=self.place.fragment(self.url))

    def fill(self, appends: int = STORED + 1) -> None:
        for number in range(appends):
            self.head = self.client.append(self.name, bytes([65 + number]) * SIZE, retry_timeout=60).end

    @property
    def info(self) -> JournalInfo:
        (found,) = self.client.list(f"name={self.name}").journals
        return found

    @property
    def stored(self) -> list[Fragment]:
        async def listed() -> list[Fragment]:
            return [each async for each in self.store.list(self.name)]

        return sorted(run_blocking(listed()), key=lambda each: each.begin)

    def listings(self) -> Iterator[list[Fragment]]:
        """Yield the fragments in the index of each replica."""
        for endpoint in self.info.route.endpoints:
            yield [each.fragment for each in self.place.replica(endpoint).fragments(self.name)]

    def begins(self) -> list[list[int]]:
        """Return the begin offsets of stored fragments in the index of each replica."""
        return [sorted(each.begin for each in listing if each.backing_store) for listing in self.listings()]

    @property
    def spools(self) -> list[Path]:
        """The content files of this journal on the brokers."""
        folder = f"-{hashlib.sha256(self.name.encode()).hexdigest()[:16]}/"
        return [path for path in self.place.cluster.data_dir.glob("brokers/**/*.content") if folder in str(path)]

    def is_only_on(self, number: int) -> bool:
        return [each.suffix for each in self.info.route.members] == [f"broker-{number}"]

    def is_settled(self) -> bool:
        known = self.begins()
        return (
            known == [[number * SIZE for number in range(STORED)]] * self.replication
            and len(self.spools) == self.replication
            and all(each.in_sync for each in self.client.heads(f"name={self.name}"))
        )

    def remove(self, *fragments: Fragment) -> None:
        for fragment in fragments:
            run_blocking(self.store.remove(fragment))

    def put(self, fragment: Fragment, content: bytes) -> None:
        run_blocking(self.store.put(fragment, content))

    def change(self, edit: Callable[[pb.JournalSpec], None]) -> None:
        info = self.info
        edit(info.spec)
        self.client.apply([pb.ApplyRequest.Change(upsert=info.spec, expect_mod_revision=info.mod_revision)])


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


class Row:
    """A row of the damage table: a group of journals of each kind, its checks, and its recovery."""

    def __init__(
        self, place: Place, name: str, variants: Sequence[str] = ("",), *, folder: str = "", dagster: bool = False
    ) -> None:
        """Create one journal of each kind. With several `variants`, each has two: in files with one replica and in S3
        with three, or the other way round. `folder` is the folder of their stores.

        With `dagster`, checks and recovery are runs of Dagster. Otherwise the test calls the functions of such runs.
        """
        self.place = place
        self.dagster = dagster
        self.group = JournalGroup(f"damage/{name}")
        self.of: Mapping[str, list[Journal]] = {
            variant: [Journal(place, f"damage/{name}/{variant}{s}-{r}", folder, s, r) for s, r in kinds]
            for variant, kinds in zip(variants, itertools.cycle(PAIRS if len(variants) > 1 else [KINDS]))
        }
        self.journals = [each for journals in self.of.values() for each in journals]
        changes = [pb.ApplyRequest.Change(upsert=each.spec()) for each in self.journals]
        if changes:
            place.client.apply(changes)
        for each in self.journals:
            each.fill()
        until(lambda: all(each.is_settled() for each in self.journals))
        if not self.journals:
            return
        assert self.deep_check() == Checked(True)

    more: MoreChecks | None = None
    doctors: MoreDoctors | None = None

    @cached_property
    def definitions(self) -> dg.Definitions:
        @dg.asset(key=self.group.name.split("/"))
        def journals() -> None: ...

        verification = build_verification(self.group, more=self.more)
        recovery = build_journal_recovery(self.group, doctors=self.doctors, audits=self.more)
        own = dg.Definitions(assets=[journals], jobs=recovery.jobs, resources={"journals": JournalResource()})
        return dg.Definitions.merge(own, verification.definitions)

    def run(self, job: str, config: dict[str, Any] | None = None) -> dg.ExecuteInProcessResult:
        definition = self.definitions.resolve_job_def(job)
        return definition.execute_in_process(
            run_config={**_QUIET, **(config or {})}, instance=self.place.instance, raise_on_error=False
        )

    def check(self, depth: Depth = Depth.CHEAP) -> Checked:
        if not self.dagster:
            return _checked(as_result(run_blocking(self._audit(depth)), dg.AssetCheckSeverity.ERROR))
        name = self.group.name.replace("/", "__").replace("-", "_")
        word = "deep_audit" if depth is Depth.DEEP else "audit"
        (found,) = self.run(f"{word}_{name}").get_asset_check_evaluations()
        return _checked(found)

    def deep_check(self) -> Checked:
        return self.check(Depth.DEEP)

    async def _audit(self, depth: Depth) -> Report:
        resource = JournalResource()
        stores = resource.stores()
        async with JournalClient.of(resource.audit_config()) as client:
            checks = self.more(client, stores) if self.more is not None else ()
            return await audit_journals(client, stores, self.group.selector_text, AuditOptions(depth), checks=checks)

    @property
    def _recovery(self) -> JournalsRecovery:
        config = JournalResource().audit_config()
        return JournalsRecovery(config, self.group.selector_text, doctors=self.doctors, audits=self.more)

    def plan(self) -> Planned:
        if self.dagster:
            return _planned(self.run("journal_recovery_plan"))
        return Planned(True, without_namespace(plan_metadata(run_blocking(self._recovery.plan()))))

    def approve(self, hash: str) -> Planned:
        if self.dagster:
            return _planned(self.run("journal_recovery", {"ops": {"recover": {"config": {"approved": hash}}}}))
        try:
            recovery = run_blocking(self._recovery.carry_out(hash))
        except NotApproved as error:
            return Planned(False, without_namespace(plan_metadata(error.plan)))
        return Planned(recovery.succeeded, without_namespace(recovery_metadata(recovery)))

    def recover(self, plan: Planned) -> None:
        """Approve a plan. Afterwards nothing is left to recover, and the recovery's audit and the check pass."""
        recovered = self.approve(plan.hash)
        assert recovered.succeeded, recovered.metadata
        assert recovered.metadata["left_summary"] == "nothing to recover"
        assert self.check() == Checked(True)

    def __enter__(self) -> Row:
        return self

    def __exit__(self, *_: object) -> None:
        infos = self.place.client.list(f"name:prefix={self.group.name}/").journals
        self.place.client.apply(
            [pb.ApplyRequest.Change(delete=each.name, expect_mod_revision=each.mod_revision) for each in infos]
        )


def _checked(found: dg.AssetCheckResult | dg.AssetCheckEvaluation) -> Checked:
    metadata = without_namespace(found.metadata or {})
    kinds = str(metadata.get("kinds", ""))
    return Checked(found.passed, frozenset(kinds.split(", ") if kinds else ()), str(metadata.get("findings", "")))


def _planned(result: dg.ExecuteInProcessResult) -> Planned:
    for event in result.all_events:
        data: Any = event.event_specific_data
        if event.is_step_failure:
            assert data.user_failure_data is not None, data.error
            return Planned(False, without_namespace(data.user_failure_data.metadata))
        if event.is_successful_output:
            return Planned(True, without_namespace(data.metadata))
    raise AssertionError("the run has no result")
