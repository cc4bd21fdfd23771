"""Real brokers in two zones, a real etcd and an S3 server, under load: each fault, and the effects of several faults.

`python -m tests.faults --minutes 30` injects them in random order for a longer time.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from coranto.testing.histories import OperationKind
from coranto.testing.history_files import porcupine_lines
from tests.faults import nemesis
from tests.faults.namespaces import Namespaces
from tests.faults.run import FaultRun, RunOptions
from tests.servers.s3 import S3Server

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


LASTING_LEASE_SECONDS = 40.0
"""Leases that must not expire are this long, so that a stalled machine loses none."""
EXPIRING_LEASE_SECONDS = 9.0
"""The leases of tests where one lease must expire, but not all together.

If all did, a reader might see content that is then lost (CHANGELOG, "Known limits").
"""


@dataclass(frozen=True)
class Round:
    """Sequential faults that share a cluster."""

    name: str
    options: RunOptions
    faults: tuple[nemesis.Fault, ...]


ROUNDS = (
    Round(
        "leases last",
        RunOptions(replications=(2, 3), lease_seconds=LASTING_LEASE_SECONDS),
        tuple(fault for fault in nemesis.FAULTS if fault not in nemesis.LASTING),
    ),
    *(
        Round(fault.__name__, RunOptions(replications=(2, 2), lease_seconds=EXPIRING_LEASE_SECONDS), (fault,))
        for fault in nemesis.EXPIRING
    ),
    Round("roll", RunOptions(replications=(2, 2), lease_seconds=LASTING_LEASE_SECONDS), (nemesis.roll,)),
    Round(
        "scale",
        RunOptions(brokers=1, replications=(1, 1), lease_seconds=LASTING_LEASE_SECONDS),
        (nemesis.scale,),
    ),
)


def test_each_fault_has_a_round() -> None:
    done = [fault for round_ in ROUNDS for fault in round_.faults]
    assert sorted(map(str, done)) == sorted(map(str, (*nemesis.FAULTS, nemesis.scale)))


LONG_ROUNDS = {"hold_etcd", "cut_etcd", "kill_for_long", "roll", "scale"}
"""Rounds that only `make test-all` runs. In the others, brokers are killed, paused and cut off."""


@pytest.mark.parametrize(
    "round_",
    [pytest.param(each, marks=pytest.mark.exhaustive) if each.name in LONG_ROUNDS else each for each in ROUNDS],
    ids=lambda round_: round_.name.replace(" ", "_"),
)
async def test_journals_stay_correct_under_faults(round_: Round, server: S3Server, tmp_path: Path) -> None:
    async with FaultRun(tmp_path, server, round_.options) as run:
        for fault in round_.faults:
            await fault(run)
        verdict = await run.conclude()
    assert verdict.problems == []
    assert verdict.outcomes["append ok"] > (60 if len(round_.faults) == 1 else 100)


@pytest.mark.exhaustive
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("iptables"), reason="namespaces need root and iptables")
async def test_packets_between_network_namespaces_are_dropped(tmp_path: Path) -> None:
    options = RunOptions(brokers=4, replications=(2, 3), lease_seconds=EXPIRING_LEASE_SECONDS)
    async with Namespaces() as network:
        with S3Server(tmp_path / "s3", host=network.gateway) as server:
            async with FaultRun(tmp_path / "run", server, options, network) as run:
                for fault in (nemesis.drop_one_way, nemesis.drop_both_ways, nemesis.isolate):
                    await fault(run)
                verdict = await run.conclude()
    assert verdict.problems == []
    assert verdict.outcomes["append ok"] > 100
    history = run.workload.history
    assert len(list(porcupine_lines(history, verdict.contents))) > 100
    assert sum(each.kind is OperationKind.READ for each in history.operations) > 0
