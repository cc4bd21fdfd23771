"""The rows of the contract that name a count, at that count: `python -m tests.platform.streams.full_counts ROW`.

Tests run the same checks with smaller counts. T10's seeds are `python -m tests.simulation.streams --lost-answers`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import resource
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import typer

from coranto.client import JournalClient
from coranto.client.config import ClientConfig
from coranto.client.connection import Connection
from coranto.effects import Clock
from coranto.messages import JsonLines
from coranto.messages.framing import Envelope
from coranto.messages.sequencer import Sequencer
from coranto.messages.uuids import CLOCK_TICK, Flags, new_producer_id
from coranto.security.call_tokens import CallTokens
from coranto.streams.model.lanes import LanePool, LaneUse
from coranto.streams.model.registers import Registers, WriterEntry, enter
from coranto.streams.writer.stream_writer import StreamWriter
from coranto.streams.writer.units import CommitResult
from tests.platform.streams.stream_world import STREAM, StreamWorld, stream_world

_ZONES = ("red", "green", "blue")
_EVENTS = 3
_BLOCK = 1 << 16
_LANES = 8


async def write(writer: StreamWriter[Any], number: int, key: str = "key") -> CommitResult:
    async with writer.transaction(key) as txn:
        for part in range(_EVENTS):
            txn.write({"n": number, "part": part})
        return await txn.commit()


async def check_whole(world: StreamWorld, transactions: int, *, segment: int = 0) -> None:
    """Check that each transaction appears once, in order, with contiguous events followed by its end."""
    messages = await world.messages(segment)
    assert len(messages) == transactions * (_EVENTS + 1), f"{len(messages)} messages of {transactions} transactions"
    for number in range(transactions):
        *events, end = messages[number * (_EVENTS + 1) : (number + 1) * (_EVENTS + 1)]
        found = [(event.message["n"], event.message["part"]) for event in events]
        assert found == [(number, part) for part in range(_EVENTS)], f"{found} instead of transaction {number}"
        assert end.flags == Flags.ACK_TXN


# ------------------------------------------------------------------------------ T1: cuts at each byte of a connection


class ByteCutter:
    """A TCP proxy that breaks the connection after a number of bytes in one direction."""

    def __init__(self, port: int) -> None:
        self.passed = Counter[str]()
        self.cut = 0
        self._port = port
        self._limits: dict[str, int] = {}
        self._live: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> ByteCutter:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self._break()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def arm(self, direction: str, passing: int) -> None:
        """Break the connection after `passing` more bytes, `up` to the broker or `down` to the client."""
        self._limits = {direction: self.passed[direction] + passing}

    def disarm(self) -> None:
        """Stop cutting."""
        self._limits = {}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError):
            upstream, onward = await asyncio.open_connection("127.0.0.1", self._port)
            self._live |= {writer, onward}
            await asyncio.gather(self._pass("up", reader, onward), self._pass("down", upstream, writer))
        self._live -= {writer}

    async def _pass(self, direction: str, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while block := await source.read(_BLOCK):
                limit = self._limits.get(direction)
                if limit is not None and self.passed[direction] + len(block) > limit:
                    target.write(block[: limit - self.passed[direction]])
                    with contextlib.suppress(OSError):
                        await target.drain()
                    self._limits.clear()
                    self.cut += 1
                    self._break()
                    return
                self.passed[direction] += len(block)
                target.write(block)
                await target.drain()
        except OSError:
            pass
        finally:
            target.close()
            self._live.discard(target)

    def _break(self) -> None:
        for writer in self._live:
            if not writer.is_closing():
                writer.close()  # Bytes written before still reach the peer.
        self._live.clear()


async def cut_bytes(transactions: int, *, lane: int = 0, lanes: int = 1) -> Counter[str]:
    """T1: commit over connections that break at one byte position after another, in both directions.

    `lanes` concurrent runs share the positions.
    """
    found = Counter[str]()
    async with (
        stream_world(grpc=True, heard=False) as world,
        ByteCutter(int(world.cluster.endpoints[0].rsplit(":", 1)[1])) as wire,
    ):

        def connect(config: ClientConfig, clock: Clock, tokens: CallTokens) -> Connection:
            return Connection(dataclasses.replace(config, endpoint=wire.endpoint), clock, tokens)

        async with (
            JournalClient(wire.endpoint, connect=connect) as client,
            StreamWriter[Any](client, STREAM) as writer,
        ):
            spans = Counter[str]()
            for number in range(10):
                before = Counter(wire.passed)
                await write(writer, number)
                if number:  # The first write opens the connection.
                    spans = spans & (wire.passed - before) if spans else wire.passed - before
            for number in range(10, transactions):
                direction = ("up", "up", "down")[number % 3]
                # Spread over the whole span; with as many transactions as bytes, at each byte.
                wire.arm(direction, (number * lanes + lane) * 7919 % (spans[direction] + 1))
                result = await write(writer, number)
                wire.disarm()
                assert result.end > result.begin >= 0
            found["cuts"] = wire.cut
            found["sent again"] = int(writer.metrics.retried._value.get())
            found["bytes up"], found["bytes down"] = spans["up"], spans["down"]
        await check_whole(world, transactions)
    return found


# -------------------------------------------------------------------------------------------- T4: read your commits


@contextlib.asynccontextmanager
async def reading_everywhere(*, heard: bool = True) -> AsyncIterator[tuple[StreamWorld, list[JournalClient]]]:
    """Three brokers that all have the stream, and a client for each of them."""
    async with stream_world(3, replication=3, zones=_ZONES, heard=heard, log_level="critical") as world:
        yield world, [world.cluster.client(name=f"client-{zone}", zone=zone) for zone in _ZONES]


async def read_back(commits: int, *, moves: int, at_once: int = 16) -> Counter[str]:
    """T4: read each commit immediately, from alternating brokers, while the journal's primary moves a few times."""
    found = Counter[str]()
    async with reading_everywhere(heard=False) as (world, readers):
        async with StreamWriter[Any](world.client, STREAM) as writer:
            given = iter(range(commits))
            move_every = commits // (moves + 1)

            async def work(key: str) -> None:
                for number in given:
                    result = await write(writer, number, key)
                    zone = number % 3
                    content = await readers[zone].read_all(result.journal, result.begin, result.end)
                    found[_ZONES[zone]] += 1
                    if content.count(b'"n":%d,' % number) != _EVENTS:
                        found["violations"] += 1
                    if moves and number % move_every == move_every - 1:
                        found["moves"] += 1
                        broker = found["moves"] % 3
                        await world.cluster.stop(broker)
                        await world.cluster.start(broker)

            await asyncio.gather(*(work(f"key {each}") for each in range(at_once)))
    return found


# --------------------------------------------------------------------------------------------- T22: short-lived writers


async def enter_many(writers: int, *, most: int = 16) -> list[int]:
    """T22: let many writers enter a segment, each for one event. Return the memory of the process in bytes, after a
    twentieth of the writers and after each tenth."""
    sizes: list[int] = []
    async with stream_world(max_writers=most, heard=False) as world:
        async with StreamWriter[Any](world.client, STREAM) as writer:
            await writer.write_event("key", {"n": 0})
        journal = (await world.streams.describe(STREAM)).segments[0].journal
        registers = Registers.of((await world.client.append(journal, b"")).registers)
        marks = {writers // 20, *(writers * tenth // 10 for tenth in range(1, 11))}
        for number in range(1, writers + 1):
            entry = WriterEntry(number, 1, 1 << 60, 1 << 30, 1_800_000_000 + number).encode()
            label = f"coranto.dev/writer-{number:012x}"
            rest = enter(registers, label, entry, nonce=f"{number:x}.1", max_writers=most)
            result = await world.client.append(
                journal,
                b"\n",
                check_registers=rest.check,
                union_registers=rest.union,
                subtract_registers=rest.subtract,
            )
            registers = Registers.of(result.registers)
            assert label in registers.entries
            assert len(registers.entries) <= most
            if number in marks:
                sizes.append(_resident())
    return sizes


# ---------------------------------------------------------------------- reader state of multi-key writers


def remembered_producers(transactions: int, *, at_once: int) -> list[int]:
    """Return the number of producers in a checkpoint at each tenth of the transactions of one writer."""
    sequencer: Sequencer[Any] = Sequencer(ring_size=1 << 10)
    framing = JsonLines()
    pool = LanePool(lambda: new_producer_id(os.urandom))
    found, offset, clock = [], 0, 1 << 40
    for begin in range(0, transactions, at_once):
        uses = [LaneUse(pool.take(), "", 0) for _ in range(at_once)]
        for flags in (Flags.CONTINUE_TXN, Flags.ACK_TXN):
            for use in uses:
                clock += CLOCK_TICK
                sequencer.queue(Envelope("a", offset, offset + 100, use.producer, clock, flags, b"", framing))
                while sequencer.step() is not None:
                    pass
                offset += 100
        pool.free(pool.take_ended())  # With the decision on the last of these transactions.
        for use in uses:
            pool.add_ended(use)
        if begin // at_once % max(1, transactions // at_once // 10) == 1:
            found.append(len(sequencer.checkpoint()["a"].seen_producers))
    return found


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


# ------------------------------------------------------------------------------------------------------- command line

app = typer.Typer(add_completion=False, no_args_is_help=True)
Count = Annotated[int, typer.Option(help="How many.")]


def _report(what: object, began: float) -> None:
    print(f"{what}; {time.process_time() - began:.0f} s of CPU")  # noqa: T201


@app.command()
def t1(count: Count = 10_000) -> None:
    """Commit transactions while connections are cut at every byte."""

    async def main() -> Counter[str]:
        # Reconnecting takes more waiting than processor time.
        found = await asyncio.gather(*(cut_bytes(count // _LANES, lane=lane, lanes=_LANES) for lane in range(_LANES)))
        return sum(found, Counter[str]())

    began = time.process_time()
    total = asyncio.run(main())
    _report({name: total[name] for name in ("cuts", "sent again")}, began)


@app.command()
def t4(count: Count = 100_000, moves: Annotated[int, typer.Option(help="Times that a broker restarts.")] = 10) -> None:
    """Read commits back immediately."""
    began = time.process_time()
    found = asyncio.run(read_back(count, moves=moves))
    _report(dict(found), began)
    if found["violations"]:
        raise typer.Exit(1)


@app.command()
def t22(count: Count = 1_000_000) -> None:
    """Run short-lived writers."""
    began = time.process_time()
    sizes = asyncio.run(enter_many(count))
    _report("MiB: " + ", ".join(f"{size / (1 << 20):.1f}" for size in sizes), began)


@app.command()
def lanes(
    count: Count = 10_000_000, at_once: Annotated[int, typer.Option(help="Concurrent transactions.")] = 32
) -> None:
    """Count the producers that readers remember of a multi-key writer, at each tenth of its transactions."""
    began = time.process_time()
    _report(f"producers: {remembered_producers(count, at_once=at_once)}", began)


if __name__ == "__main__":
    app()
