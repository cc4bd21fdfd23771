"""Real brokers in two zones, a real etcd and an S3 server, under load: each fault by itself, and what is left of it.

`python -m coranto.testing.faults --minutes 30` does them all in any order for as long as is wanted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from coranto.testing.faults import nemesis
from coranto.testing.faults.run import FaultRun, RunOptions
from coranto.testing.s3_server import S3Server

pytestmark = [pytest.mark.system, pytest.mark.integration, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


BRIEF = (nemesis.pause_briefly, nemesis.hold_brokers, nemesis.delay_brokers)
"""Faults after which everything still runs, so that their tests share a cluster."""


LASTING_LEASE_SECONDS = 40.0
"""Leases that must not run out last this long, so that a machine that stands still for a while ends none."""
EXPIRING_LEASE_SECONDS = 9.0
"""The leases of tests in which one lease must run out, but not all at once.

If all did, a reader might see content that is then lost (CHANGELOG, "Known limits").
"""


@pytest.fixture
def options(fault: nemesis.Fault) -> RunOptions:
    replications = (2, 2) if fault in nemesis.LASTING else (2, 3)
    lease_seconds = EXPIRING_LEASE_SECONDS if fault in nemesis.EXPIRING else LASTING_LEASE_SECONDS
    return RunOptions(replications=replications, lease_seconds=lease_seconds)


@pytest.fixture
async def run(server: S3Server, tmp_path: Path, options: RunOptions) -> AsyncIterator[FaultRun]:
    async with FaultRun(tmp_path, server, options) as run:
        yield run


@pytest.mark.parametrize(
    "fault", [fault for fault in nemesis.FAULTS if fault not in BRIEF], ids=lambda fault: fault.__name__
)
async def test_a_fault(run: FaultRun, fault: nemesis.Fault) -> None:
    await fault(run)
    verdict = await run.conclude()
    assert verdict.problems == []
    assert verdict.outcomes["append ok"] > 60


@pytest.mark.parametrize(
    "options",
    [RunOptions(replications=(2, 3), lease_seconds=LASTING_LEASE_SECONDS)],
    ids=["three brokers"],
)
async def test_brief_faults(run: FaultRun) -> None:
    for fault in BRIEF:
        await fault(run)
    verdict = await run.conclude()
    assert verdict.problems == []
    assert verdict.outcomes["append ok"] > 100


@pytest.mark.parametrize(
    "options",
    [RunOptions(brokers=1, replications=(1, 1), lease_seconds=LASTING_LEASE_SECONDS)],
    ids=["from one broker"],
)
async def test_scale_up_and_down(run: FaultRun) -> None:
    await nemesis.scale(run)
    verdict = await run.conclude()
    assert verdict.problems == []
