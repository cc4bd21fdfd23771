"""The main job of the demo on a slice of the flights: both passes, the kill between them, and the proof."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from coranto.audit.signing import verify_report
from coranto.client import ClientConfig
from coranto.security.tokens import Keys
from coranto_flights.data import load_flights
from coranto_flights.proof import prove, prove_alerts, prove_table
from coranto_flights.signed_audit import KEY, REPORT, audit_and_sign
from dagster_coranto.flights.materialize import consumer_name, materialize
from dagster_coranto.flights.run import FIRST, SECOND, Demo, _total_bytes
from dagster_coranto.instance.home import dagster_environment
from tests.sampling import sampled
from tests.servers.sql import PostgresServer

pytestmark = [pytest.mark.timeout(1500), pytest.mark.usefixtures("spark")]

FLIGHTS = 12_000


def await_end_of_processes_with(path: Path) -> None:
    """Return once no process has `path` in its command line: a JVM ends a little after its program."""
    deadline = time.monotonic() + 60
    while left := processes_with(path):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def processes_with(path: Path) -> list[str]:
    """Return the command lines of processes that contain `path`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue  # It has ended.
        if str(path) in words:
            found.append(words)
    return found


def consume_into_postgresql(demo: Demo, config: ClientConfig, total: int, flights: pd.DataFrame, data: Path) -> None:
    """Kill another consumer of the same journals, with its table in PostgreSQL. It publishes their alerts again."""
    with PostgresServer() as server, pytest.MonkeyPatch.context() as environment:
        published = [flights]
        for _ in range(3):  # On a busy machine it may finish before the kill.
            environment.setenv("CORANTO_STORE_URL", url := server.new_database())
            job = replace(SECOND, max_transaction_bytes=total // 4)
            published.append(flights)
            if killed := demo._consume_and_kill(job, total):
                break
        assert "kill -9" in killed
        for name, value in dagster_environment(data, {}).items():
            environment.setenv(name, value)
        job = replace(job, limit=FLIGHTS)
        assert materialize(job, ["carrier_delays", "flights/alerts"], log_level="WARNING")
        assert prove_table(url, job.table, flights).holds
        alerts = prove_alerts(config, SECOND.prefix, pd.concat(published, ignore_index=True))
        assert alerts.holds, alerts.detail


@pytest.fixture
def quiet() -> Iterator[Console]:
    with Path("/dev/null").open("w") as nowhere:
        yield Console(file=nowhere)


@pytest.mark.parametrize("in_postgresql", sampled([False, True], 2))
def test_the_main_job_is_proven_and_its_proof_detects_damage(
    tmp_path: Path, quiet: Console, monkeypatch: pytest.MonkeyPatch, in_postgresql: bool
) -> None:
    monkeypatch.delenv("CORANTO_STORE_URL", raising=False)
    data = tmp_path / "demo"
    outcome = Demo(data, limit=FLIGHTS, console=quiet).run()
    assert outcome.holds, [finding for _, finding in outcome.findings if not finding.holds]
    assert len(outcome.findings) == 7
    assert "kill -9" in outcome.killed
    await_end_of_processes_with(data)

    # On a second run, the consumer has nothing left to do, and all is proven again.
    again = Demo(data, limit=FLIGHTS, console=quiet)
    store_url = f"sqlite:///{data / 'store.db'}"
    flights = load_flights(FLIGHTS)
    with again.cluster() as config:
        total = _total_bytes(config, SECOND)
        assert "earlier run" in again._consume_and_kill(SECOND, total)
        claims = [*again.prove(config, FIRST, flights), *again.prove(config, SECOND, flights)]
        claims.append(again.audit(config, [FIRST, SECOND]))
        assert len(claims) == 7
        assert [claim for claim in claims if not claim.holds] == []

        if in_postgresql:
            consume_into_postgresql(again, config, total, flights, data)

        # The proof detects damage: a changed cell of the table, then a changed byte of a fragment.
        with sqlite3.connect(data / "store.db") as database:
            database.execute("UPDATE carrier_delays SET cancelled = cancelled + 1 WHERE carrier = 'UA'")
        assert not prove_table(store_url, FIRST.table, flights).holds
        events = sorted((data / "fragments" / "flights" / "events").rglob("0*-*"))
        victim = next(path for path in events if path.is_file())
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 0xFF
        victim.write_bytes(content)
        coverage = prove(config, store_url, flights)[-1]
        audit = audit_and_sign(config, store_url, {consumer_name(FIRST): FIRST.table}, data)
    assert not coverage.holds
    assert victim.name in coverage.detail
    assert not audit.holds
    assert "flights/events" in audit.detail
    assert verify_report((data / REPORT).read_text(), Keys.parse((data / KEY).read_text())).errors
