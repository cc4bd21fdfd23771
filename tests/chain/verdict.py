"""The check that stores and journals of the chain hold exactly the expected results."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import select

from coranto.client.committed import async_committed_reader
from coranto.messages import JsonLines
from coranto_consumers.recoverylog.hint_store import HintKeys, HintStore
from coranto_consumers.recoverylog.player import Player
from coranto_consumers.stores import SqlStore
from coranto_consumers.stores.json_file import STATE_FILE
from coranto_consumers.stores.sqlite_file import DATABASE_FILE
from tests.chain.applications import SUMS
from tests.chain.chain import Chain
from tests.chain.model import ALERTS, CLEAN, STAGES, TOTALS, Stage, of_stream

_SAMPLE = 3

Rows = Mapping[str, Sequence[Any]]
"""Rows by stream."""


@dataclass(slots=True)
class ChainVerdict:
    """The problems, if any, and counts of processed messages."""

    problems: list[str]
    numbers: int
    transactions: dict[str, int]
    totals: int
    alerts: int
    settled_seconds: float
    """The time from the last harm until everything was processed."""

    def __str__(self) -> str:
        transactions = ", ".join(f"{count} {fate}" for fate, count in self.transactions.items())
        done = (
            f"{self.numbers} numbers (transactions: {transactions}) became {self.totals} totals and {self.alerts} "
            f"alerts; all was processed {self.settled_seconds:.1f} s after the last harm"
        )
        return "\n".join((done, *self.problems))


async def conclude(chain: Chain) -> ChainVerdict:
    """Wait until all numbers are processed, stop the consumers, and check every store and journal.

    Raises ClusterError when the numbers are not processed in time.
    """
    begun = asyncio.get_running_loop().time()
    await chain.end_publishing()
    expected = chain.expected
    await chain.until(lambda: chain.streams_done >= len(expected), "the last number of every stream has arrived")
    settled = asyncio.get_running_loop().time() - begun
    await chain.until(
        lambda: all(consumer.is_serving and consumer.is_complete for consumer in chain.consumers),
        "all shards have a primary, and all members are present",
    )
    chain.let_members_end()
    problems = await _stop_consumers(chain)
    alerts = {stream: each.alerts for stream, each in expected.items()}
    problems += differences("alerts, as read by the followers", alerts, of_stream(chain.alerts))
    for journals, wanted in (
        (CLEAN, {stream: each.cleaned for stream, each in expected.items()}),
        (TOTALS, {stream: each.totals for stream, each in expected.items()}),
        (ALERTS, alerts),
    ):
        found = of_stream([message for journal in journals for message in await _committed(chain, journal)])
        problems += differences(f"{journals[0].rpartition('/')[0]}, read committed", wanted, found)
    problems += await _stores(chain)
    return ChainVerdict(
        problems,
        numbers=sum(each.count for each in expected.values()),
        transactions={
            fate: sum(publisher.transactions[fate] for publisher in chain.publishers)
            for fate in chain.publishers[0].transactions
        },
        totals=sum(len(each.totals) for each in expected.values()),
        alerts=sum(map(len, alerts.values())),
        settled_seconds=settled,
    )


def differences(what: str, expected: Rows, found: Rows) -> list[str]:
    """Return a line for each of the first differing streams, and one for the number of the others."""
    wrong = [stream for stream in sorted(expected.keys() | found.keys()) if _at(expected, stream) != _at(found, stream)]
    lines = [
        f"{what}: {stream}: {_difference(_at(expected, stream), _at(found, stream))}" for stream in wrong[:_SAMPLE]
    ]
    return [*lines, *([f"{what}: {len(wrong) - _SAMPLE} more streams differ"] if len(wrong) > _SAMPLE else [])]


def _at(rows: Rows, stream: str) -> list[Any]:
    return list(rows.get(stream, ()))


def _difference(expected: list[Any], found: list[Any]) -> str:
    place = next((n for n, pair in enumerate(zip(expected, found, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        return f"{len(expected)} expected, {len(found)} found"
    return f"the {place + 1}th of {len(found)} ({len(expected)} expected) is {found[place]}, not {expected[place]}"


async def _stop_consumers(chain: Chain) -> list[str]:
    members = [member for consumer in chain.consumers for member in consumer.members if member.is_running]
    codes = await asyncio.gather(*(member.stop() for member in members))
    problems = [
        f"{member.name} ended with {code} on SIGTERM:\n{member.log_tail()}"
        for member, code in zip(members, codes, strict=True)
        # A member that lost its lease exits with code 1, which is expected.
        if code and not (code == 1 and "lease.lost" in member.log_tail(lines=100))
    ]
    problems += [failure for consumer in chain.consumers for failure in consumer.failures]
    for member in members:
        words = await asyncio.to_thread(member.log.read_text, errors="replace")
        problems += [f"{member.log} has {what}" for what in ("Traceback", "never retrieved") if what in words]
    return problems


async def _committed(chain: Chain, journal: str) -> list[dict[str, Any]]:
    head = await chain.client.head(journal)
    if not head:
        return []
    return [dict(each.message) async for each in async_committed_reader(chain.client, journal, JsonLines(), end=head)]


async def _stores(chain: Chain) -> list[str]:
    expected = chain.expected
    clean, aggregate, alert = STAGES
    states: dict[str, list[Any]] = {}
    for folder in await _recovered(chain, clean):
        for stream, state in json.loads((folder / STATE_FILE).read_text().splitlines()[1]).items():
            states.setdefault(stream, []).append(state)
    counted = {
        stream: [{"count": each.count, "dropped": each.dropped, "sum": each.sum, "digest": each.digest}]
        for stream, each in expected.items()
    }
    problems = differences(f"store of {clean.name}", counted, states)

    def sums() -> dict[str, list[Any]]:
        with SqlStore(chain.store_url).engine.connect() as connection:
            return {stream: [tuple(row)] for stream, *row in connection.execute(select(SUMS))}

    summed = {stream: [(each.count, each.sum, each.digest)] for stream, each in expected.items()}
    problems += differences(f"store of {aggregate.name}", summed, await asyncio.to_thread(sums))

    totals: dict[str, list[Any]] = {}
    for folder in await _recovered(chain, alert):
        with closing(sqlite3.connect(folder / DATABASE_FILE)) as database:
            for stream, *row in database.execute("SELECT * FROM totals ORDER BY stream, count"):
                totals.setdefault(stream, []).append(tuple(row))
    published = {
        stream: [(total["count"], total["sum"], total["digest"], 1) for total in each.totals]
        for stream, each in expected.items()
    }
    return [*problems, *differences(f"store of {alert.name}", published, totals)]


async def _recovered(chain: Chain, stage: Stage) -> list[Path]:
    """Recover the stores of a consumer's shards from their recovery logs, and return their folders."""
    folders = []
    for spec, log in zip(stage.specs(), stage.recovery_logs, strict=True):
        folder = chain.folder / "recovered" / spec.id
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        hints = await HintStore(
            chain.ground.coordinator, HintKeys(stage.hint_prefix, spec.id, spec.hint_backups)
        ).fetch()
        async with Player(chain.client, hints.pick(log), folder) as player:
            await player.finish()
        folders.append(folder)
    return folders
