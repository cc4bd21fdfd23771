"""The main job from beginning to end: cluster, two passes over the flights, a kill in the second, proof and audit.

It uses the same components as any user: the cluster of `coranto up`, and Dagster materialisations in separate processes
(`dagster_coranto.flights.materialize`), with the cluster's folder in the environment. It can be run again: journals and
tables stay below the data directory, and each step does only the remaining work.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table

from coranto.client import ClientConfig, SyncJournalClient
from coranto.cluster import EmbeddedCluster
from coranto.errors import ClusterError
from coranto_consumers.stores.sql import SqlStore
from coranto_flights.data import load_flights
from coranto_flights.proof import CheckedClaim, prove
from coranto_flights.signed_audit import KEY, REPORT, audit_and_sign
from dagster_coranto.flights.materialize import Job, consumer_name, store_url
from dagster_coranto.instance.home import dagster_environment

FIRST = Job()
SECOND = Job(prefix="second/", table="carrier_delays_second")
_SECONDS = (SECOND, *(replace(SECOND, prefix=f"second-{n}/", table=f"{SECOND.table}_{n}") for n in (2, 3)))
"""The second pass and its retries. On a busy machine, a consumer may finish before it is killed."""
_SECOND_TRANSACTIONS = 4
"""The approximate number of transactions of the second pass, so that the kill comes between commits for any data."""
_LEASE_S = 30.0
"""The lease time of brokers. It is long, so that brokers keep their leases if the machine pauses for a while."""
_KILL_AFTER = 0.2
_POLL_S = 0.1


@dataclass(slots=True)
class DemoResult:
    """The findings of a demo, step by step."""

    findings: list[tuple[str, CheckedClaim]] = field(default_factory=list)
    seconds: float = 0.0
    killed: str = ""

    @property
    def holds(self) -> bool:
        return bool(self.findings) and all(finding.holds for _, finding in self.findings)


class Demo:
    """One run of the main job below `data_dir`. `limit` is the number of flights to take (0: all).

    With `lake`, another consumer copies them into an Iceberg table.
    """

    def __init__(
        self, data_dir: Path, *, limit: int = 0, brokers: int = 1, lake: bool = False, console: Console | None = None
    ) -> None:
        self._data_dir = data_dir
        self._limit = limit
        self._brokers = brokers
        self._lake = lake
        self._console = console or Console()
        self._children: list[subprocess.Popen[bytes]] = []

    def run(self) -> DemoResult:
        """Run both passes and prove them. Raises ClusterError or CorantoError when a part cannot run."""
        begun = time.monotonic()
        outcome = DemoResult()
        flights = load_flights(self._limit)
        self._print(f"[bold]{len(flights):,} flights[/] that left New York in 2013; everything below {self._data_dir}")
        with self.cluster() as config:
            self._print("\n[bold]1. First pass:[/] specs → flights/events → carrier_delays, flights/alerts")
            self._materialize(FIRST)
            outcome.findings += [("first pass", f) for f in self.prove(config, FIRST, flights)]
            self._print("\n[bold]2. Second pass[/], over fresh journals; its consumer is killed half-way")
            second, outcome.killed = self.second_pass(config)
            outcome.findings += [("second pass", f) for f in self.prove(config, second, flights)]
            self._print("\n[bold]3. Audit[/] of all journals, to the last byte, and of both consumers")
            outcome.findings.append(("both", self.audit(config, [FIRST, second])))
        outcome.seconds = time.monotonic() - begun
        return outcome

    @contextmanager
    def cluster(self) -> Iterator[ClientConfig]:
        """Run the demo's cluster, and yield a client configuration for it."""
        with EmbeddedCluster(self._data_dir, brokers=self._brokers, lease_seconds=_LEASE_S) as cluster:
            self._print(f"[bold]Cluster[/] of etcd and {self._brokers} broker(s) is up at {cluster.info.endpoint}")
            try:
                yield ClientConfig(cluster.info.endpoint, cluster.info.file_root)
            finally:
                for child in self._children:
                    _end(child)

    def _environment(self) -> dict[str, str]:
        return dagster_environment(self._data_dir)

    def _start(self, job: Job, selection: Sequence[str]) -> subprocess.Popen[bytes]:
        job = replace(job, limit=self._limit, lake=self._lake)
        command = [sys.executable, "-m", "dagster_coranto.flights.materialize", job.to_json(), *selection]
        child = subprocess.Popen(command, env=self._environment())
        self._children.append(child)
        return child

    def _materialize(self, job: Job, selection: Sequence[str] = ()) -> None:
        code = self._start(job, selection).wait()
        if code != 0:
            raise ClusterError(
                f"Dagster's run of {', '.join(selection) or 'all assets'} failed (exit code {code}); "
                "its events are above, and in `make ui`"
            )

    def second_pass(self, config: ClientConfig) -> tuple[Job, str]:
        """Run a job over fresh journals, and kill its consumer half-way. Returns the job and a text about the kill.

        Raises ClusterError if every consumer finished before it could be killed.
        """
        for job in _SECONDS:
            self._materialize(job, ["journal_specs", "flights/events"])
            total = _total_bytes(config, job)
            cut = replace(job, max_transaction_bytes=max(1, total // _SECOND_TRANSACTIONS))
            killed = self._consume_and_kill(cut, total)
            if killed:
                self._print(killed)
                self._materialize(cut)
                return cut, killed
            self._print("The consumer finished before it could be killed; trying again over fresh journals")
        raise ClusterError(
            f"{len(_SECONDS)} consumers finished before they could be killed; is this machine very busy?"
        )

    def prove(self, config: ClientConfig, job: Job, flights: pd.DataFrame) -> list[CheckedClaim]:
        """Compare the results of a finished job with the flights."""
        claims = prove(config, store_url(self._data_dir), flights, prefix=job.prefix, table=job.table)
        if self._lake:
            from coranto_flights.lake import prove_lake

            claims.append(prove_lake(self._data_dir, job.table, flights))
        return claims

    def audit(self, config: ClientConfig, jobs: Sequence[Job]) -> CheckedClaim:
        """Audit all journals and the consumers of finished jobs, and keep the signed report."""
        tables = {consumer_name(job): job.table for job in jobs}
        return audit_and_sign(config, store_url(self._data_dir), tables, self._data_dir)

    def _consume_and_kill(self, job: Job, total: int) -> str:
        """Start the consumer and `kill -9` it after its first commits. Returns "" if it finished before."""
        store, shard = SqlStore(store_url(self._data_dir)), consumer_name(job)
        if _consumed(store, shard) >= total:
            return "An earlier run has finished the second pass; `--fresh` starts over."
        child = self._start(job, ["carrier_delays", "flights/alerts"])
        while child.poll() is None:
            consumed = _consumed(store, shard)
            if _KILL_AFTER * total <= consumed < total:
                child.send_signal(signal.SIGKILL)
                child.wait()
                return (
                    f"[bold red]kill -9[/] of the consumer (pid {child.pid}) with {consumed:,} of {total:,} bytes "
                    f"committed; starting it again"
                )
            time.sleep(_POLL_S)
        if child.returncode != 0:
            raise ClusterError(f"the consumer failed (exit code {child.returncode}); its events are above")
        return ""

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False)


def _total_bytes(config: ClientConfig, job: Job) -> int:
    """Return the current bytes of the job's source journals."""
    with SyncJournalClient.of(config) as client:
        journals = client.list(f"name:prefix={job.prefix}flights/events/").journals
        return sum(client.head(journal.name) for journal in journals)


def _consumed(store: SqlStore, shard: str) -> int:
    """Return the bytes of source journals that the consumer has processed, from its checkpoint."""
    found = store.read(shard)
    return 0 if found is None else sum(source.read_through for source in found.checkpoint.sources.values())


def _end(child: subprocess.Popen[bytes], timeout_s: float = 10.0) -> None:
    """Stop a child process: interrupt it, and kill it if it does not end in time."""
    if child.poll() is not None:
        return
    child.send_signal(signal.SIGINT)
    try:
        child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def print_report(outcome: DemoResult, data_dir: Path, console: Console) -> None:
    """Print the proof as a table, and suggest what to try next."""
    table = Table(title="Proof", title_justify="left")
    table.add_column("")
    table.add_column("pass")
    table.add_column("claim")
    table.add_column("seen")
    for name, finding in outcome.findings:
        table.add_row("[green]✓[/]" if finding.holds else "[red]✗[/]", name, finding.claim, finding.detail)
    console.print()
    console.print(table)
    verdict = "[bold green]It all holds[/]" if outcome.holds else "[bold red]It does not hold[/]"
    console.print(f"{verdict} ({outcome.seconds:.0f} s).", highlight=False)
    shown = data_dir if not data_dir.is_relative_to(Path.cwd()) else data_dir.relative_to(Path.cwd())
    console.print(
        f"""
Try next:
  make ui                                                   the same cluster in Dagster's UI
  .venv/bin/coranto up --data-dir {shown}            the same cluster, for the commands below in another shell:
  export CORANTO_DATA={data_dir}
  .venv/bin/coranto journals list
  .venv/bin/coranto journals read flights/alerts/part-000 --committed | head
  .venv/bin/coranto journals fragments flights/events/part-000
  .venv/bin/coranto audit flights/                          audit the journals again
  CORANTO_AUTH_KEYS="$(cat {shown}/{KEY})" .venv/bin/coranto audit verify {shown}/{REPORT}
""",
        highlight=False,
        soft_wrap=True,
    )
