"""Small appends at a rate above the brokers' capacity, as from many independent users.

Users are separate processes. A closed loop measures the capacity first: each task of a user waits for its answer. Then
an open loop begins appends at a multiple of that rate, each when it is due, regardless of earlier appends. A user gives
up after DEADLINE_SECONDS without an answer.

On a few shared cores, the failed work of users would take the brokers' time. So brokers are suspended most of the time,
and get SHARE of a core each. The figures then show the brokers' behavior under overload.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple, TypeVar

import psutil

from benchmarks.append import JOURNAL, Journal, cluster_of
from benchmarks.append_stream import CONTENT, broker_processes
from benchmarks.runner import Figure
from coranto.client import JournalClient
from coranto.errors import CorantoError

USERS = 4
"""Processes that append."""
TASKS = 16
"""Tasks of each process in the measurement of the capacity."""
SECONDS = 4.0
DEADLINE_SECONDS = 2.0
BELOW = 0.5
"""A share of the capacity without queueing: the floor of latencies."""
FACTORS = (1.0, 1.5, 3.0)
SHARE = 0.2
"""The share of time that brokers run."""
_CYCLE_SECONDS = 0.02
_TICK_SECONDS = 0.005
_START_SECONDS = 1.0
"""The time that users have to connect, before all of them begin together."""


T = TypeVar("T")


class Seen(NamedTuple):
    """The results of one user's, or all users', appends in one turn. Latencies are in seconds from the due time."""

    offered: int
    refused: int
    given_up: int
    latencies: list[float]

    @property
    def rate(self) -> float:
        return len(self.latencies) / SECONDS

    @property
    def percent(self) -> float:
        return 100 * len(self.latencies) / self.offered

    def quantile(self, share: float) -> float:
        """Return a quantile of the latencies, in milliseconds."""
        return sorted(self.latencies)[int(len(self.latencies) * share)] * 1e3


@contextlib.contextmanager
def slowed(brokers: Sequence[psutil.Process]) -> Iterator[None]:
    """Let brokers run for SHARE of each cycle, and suspend them for the rest."""
    done = threading.Event()

    def cycles() -> None:
        while not done.wait(_CYCLE_SECONDS * SHARE):
            for each in brokers:
                each.suspend()
            done.wait(_CYCLE_SECONDS * (1 - SHARE))
            for each in brokers:
                each.resume()

    thread = threading.Thread(target=cycles)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _closed(endpoint: str, tasks: int, begin: float) -> Seen:
    """Append in tasks that wait for their answers, from the monotonic time `begin`."""
    latencies: list[float] = []

    async def task(client: JournalClient) -> None:
        while (begun := time.monotonic()) < begin + SECONDS:
            await client.append(JOURNAL, CONTENT)
            latencies.append(time.monotonic() - begun)

    async def run() -> None:
        async with JournalClient(endpoint) as client:
            await client.append(JOURNAL, CONTENT)
            await asyncio.sleep(begin - time.monotonic())
            await asyncio.gather(*(task(client) for _ in range(tasks)))

    asyncio.run(run())
    return Seen(len(latencies), 0, 0, latencies)


def _open(endpoint: str, rate: float, begin: float) -> Seen:
    """Begin `rate` appends per second, from the monotonic time `begin`, and return their results."""
    refused = given_up = offered = 0
    latencies: list[float] = []
    users = set[asyncio.Task[None]]()

    async def user(client: JournalClient, due: float) -> None:
        nonlocal refused, given_up
        try:
            async with asyncio.timeout(due + DEADLINE_SECONDS - time.monotonic()):
                await client.append(JOURNAL, CONTENT)
        except TimeoutError:
            given_up += 1
        except CorantoError:
            refused += 1
        else:
            latencies.append(time.monotonic() - due)

    async def run() -> None:
        nonlocal offered
        async with JournalClient(endpoint) as client:
            await client.append(JOURNAL, CONTENT)
            await asyncio.sleep(begin - time.monotonic())
            most = int(rate * SECONDS)
            while offered < most:
                due_count = min(most, int((time.monotonic() - begin) * rate))
                for number in range(offered, due_count):
                    each = asyncio.create_task(user(client, begin + number / rate))
                    users.add(each)
                    each.add_done_callback(users.discard)
                offered = due_count
                await asyncio.sleep(_TICK_SECONDS)
            while users:
                await asyncio.wait(users)

    asyncio.run(run())
    return Seen(offered, refused, given_up, latencies)


class _Users:
    """The processes that append to one cluster."""

    def __init__(self, endpoint: str, pool: ProcessPoolExecutor) -> None:
        self._endpoint = endpoint
        self._pool = pool

    def closed(self) -> Seen:
        return self._all(_closed, TASKS)

    def open(self, rate: float) -> Seen:
        return self._all(_open, rate / USERS)

    def _all(self, turn: Callable[[str, T, float], Seen], argument: T) -> Seen:
        begin = time.monotonic() + _START_SECONDS
        running = [self._pool.submit(turn, self._endpoint, argument, begin) for _ in range(USERS)]
        seen = [each.result() for each in running]
        return Seen(
            sum(each.offered for each in seen),
            sum(each.refused for each in seen),
            sum(each.given_up for each in seen),
            [latency for each in seen for latency in each.latencies],
        )


def _turn(users: _Users) -> tuple[Seen, dict[float, Seen]]:
    """Return the users' results at the capacity, and at each multiple of it."""
    closed = users.closed()
    return closed, {factor: users.open(closed.rate * factor) for factor in (BELOW, *FACTORS)}


def _figures(rounds: int, replication: int) -> Iterator[Figure]:
    with (
        cluster_of(replication) as (cluster, client),
        ProcessPoolExecutor(USERS, multiprocessing.get_context("spawn")) as pool,
    ):
        Journal(client, JOURNAL, replication).renew()
        users = _Users(cluster.info.endpoint, pool)
        with slowed(broker_processes()):
            users.closed()  # Warm up.
            turns = [_turn(users) for _ in range(rounds)]
    capacities = [closed.rate for closed, _ in turns]
    below = [seen[BELOW] for _, seen in turns]
    for factor in FACTORS:
        found = [seen[factor] for _, seen in turns]
        name = f"{len(CONTENT)} B appends due at {factor:g} × capacity, R={replication}"
        yield Figure(name, "appends/s", [each.rate for each in found], capacities, "the capacity")
        for quantile in (0.5, 0.99):
            yield Figure(
                f"{name}, latency p{quantile * 100:.0f}",
                "ms",
                [each.quantile(quantile) for each in found],
                [each.quantile(quantile) for each in below],
                f"due at {BELOW:g} × capacity",
                note="less is better",
            )
        refused, given_up = sum(each.refused for each in found), sum(each.given_up for each in found)
        yield Figure(
            f"{name}, committed of those due",
            "%",
            [each.percent for each in found],
            [each.percent for each in below],
            f"due at {BELOW:g} × capacity",
            note=f"{refused} refused, {given_up} given up after {DEADLINE_SECONDS:g} s",
        )


def run(rounds: int) -> list[Figure]:
    return [figure for replication in (1, 3) for figure in _figures(rounds, replication)]
