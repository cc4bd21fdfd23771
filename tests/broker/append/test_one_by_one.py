"""An append has the same outcome in the queue as one by one, on any path.

It arrives over a stream of appends or as a separate call. It commits inline or in a batch. One by one, the state
machine prepares each append, with its content buffered or in pieces, and no other append commits with it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coranto import labels
from coranto.client import AppendResult, JournalClient, Suspend
from coranto.client.dispatch import Dispatcher
from coranto.errors import CorantoError
from coranto.testing import Cluster
from coranto.testing.sim.loop import SimLoop, simulated
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append import batch, queue
from coranto_broker.append import registers as of_registers
from coranto_broker.append.queue import JournalQueue
from coranto_broker.append.receiving import Inbox
from coranto_broker.handlers import append as append_handler
from coranto_broker.handlers import append_stream as append_stream_handler
from tests.sampling import examples

JOURNAL = "test/paths"


@dataclass(frozen=True)
class Step:
    """One append. Its offset is the journal's end plus `shift`; None: no offset."""

    content: bytes = b"x"
    shift: int | None = None
    check: tuple[tuple[str, str], ...] = ()
    without: tuple[tuple[str, str], ...] = ()
    union: tuple[tuple[str, str], ...] = ()
    subtract: tuple[tuple[str, str], ...] = ()
    suspend: Suspend = Suspend.RESUME


NAMES = st.sampled_from(["author", "epoch"])
PAIRS = st.lists(st.tuples(NAMES, st.sampled_from(["", "1", "2"])), max_size=2).map(tuple)
SETS = st.dictionaries(NAMES, st.sampled_from(["1", "2"]), max_size=2).map(lambda found: tuple(found.items()))
STEPS = st.builds(
    Step,
    content=st.sampled_from([b"", b"x", b"some more", b"y" * 700]),
    shift=st.sampled_from([None, None, None, None, 0, 1, -1]),
    check=PAIRS,
    without=PAIRS,
    union=SETS,
    subtract=SETS,
    suspend=st.sampled_from([Suspend.RESUME] * 6 + list(Suspend)),
)
AUTHOR = (("author", "1"),)
QUICK = [Step(b"first"), Step(b"y" * 1200), Step(b"second"), Step(union=AUTHOR), Step(check=AUTHOR)]


async def append_step(client: JournalClient, step: Step, end: int) -> AppendResult:
    """Append a step's content to the journal. Its offset is relative to `end`. Raises the client's errors."""
    return await client.append(
        JOURNAL,
        step.content,
        offset=0 if step.shift is None else max(0, end + step.shift),
        check_registers=labels.label_selector(include=list(step.check), exclude=list(step.without))
        if step.check or step.without
        else None,
        union_registers=labels.label_set(**dict(step.union)) if step.union else None,
        subtract_registers=labels.label_set(**dict(step.subtract)) if step.subtract else None,
        suspend=step.suspend,
    )


def outcome_of(
    steps: list[Step], prepare: Callable[[ExitStack], None], replication: int = 1
) -> tuple[list[object], bytes, int]:
    """Return the outcomes of consecutive appends, the journal's content, and how many appends were not prepared."""
    outcomes: list[object] = []
    content, quick = b"", 0

    def counting(path: Callable[..., bool]) -> Callable[..., bool]:
        def counted(*arguments: Any) -> bool:
            nonlocal quick
            found = path(*arguments)
            quick += found
            return found

        return counted

    async def main(loop: SimLoop) -> None:
        nonlocal content
        async with Cluster(brokers=replication) as cluster:
            spec = pb.JournalSpec(name=JOURNAL, replication=replication)
            spec.fragment.length, spec.fragment.compression_codec = 1024, pb.NONE
            spec.fragment.refresh_interval.seconds = 60
            await cluster.create(spec)
            client, end = cluster.client(retry_timeout=5), 0
            for step in steps:
                try:
                    done = await append_step(client, step, end)
                    end = done.end
                    registers = [(each.name, each.value) for each in done.registers.labels]
                    outcomes.append((done.begin, done.end, done.sum, registers))
                except CorantoError as error:
                    outcomes.append(type(error).__name__)
            content = await client.read_all(JOURNAL, 0, end) if end else b""

    with ExitStack() as stack:
        for path in ("_commit_inline", "_propose_next"):
            stack.enter_context(patch.object(JournalQueue, path, counting(getattr(JournalQueue, path))))
        prepare(stack)
        with simulated(0) as loop:
            loop.run_until_complete(main(loop))
    return outcomes, content, quick


def one_by_one(stack: ExitStack) -> None:
    """Have the state machine resolve and prepare each append, and propose it alone."""
    for path in ("_commit_inline", "_propose_next"):
        stack.enter_context(patch.object(JournalQueue, path, lambda *_: False))
    stack.enter_context(patch.object(queue, "MAX_BATCH_APPENDS", 1))
    for handler in (append_handler, append_stream_handler):
        stack.enter_context(patch.object(handler, "recognize", lambda *_: False))


def over_a_stream(stack: ExitStack) -> None:
    """Append over a stream of appends, through the queue."""
    stack.enter_context(patch.object(Dispatcher, "streams_appends", True))


def over_a_stream_one_by_one(stack: ExitStack) -> None:
    over_a_stream(stack)
    one_by_one(stack)


def by_calls(stack: ExitStack) -> None:
    """Append by separate calls, through the queue."""


def by_calls_one_by_one(stack: ExitStack) -> None:
    one_by_one(stack)


def by_calls_in_pieces(stack: ExitStack) -> None:
    async def receive(*_: object) -> None:
        return None

    one_by_one(stack)
    stack.enter_context(patch.object(Inbox, "receive", receive))


@given(st.lists(STEPS, min_size=1, max_size=8))
@example(QUICK)
@settings(max_examples=examples(25), deadline=None)
def test_an_append_has_the_same_outcome_in_the_queue_as_one_by_one(steps: list[Step]) -> None:
    steps = [Step(b"begun"), Step(b"z" * 1100), Step(b"and rolled"), *steps]
    outcomes, content, quick = outcome_of(steps, over_a_stream)
    assert outcome_of(steps, by_calls) == (outcomes, content, quick)
    for way in (over_a_stream_one_by_one, by_calls_one_by_one, by_calls_in_pieces):
        assert outcome_of(steps, way) == (outcomes, content, 0), way.__name__


@given(st.lists(STEPS, min_size=1, max_size=8))
@example(QUICK)
@settings(max_examples=examples(25), deadline=None)
def test_an_append_to_replicas_has_the_same_outcome_in_the_queue_as_one_by_one(steps: list[Step]) -> None:
    steps = [Step(b"begun"), Step(b"z" * 1100), Step(b"and rolled"), *steps]
    outcomes, content, _ = outcome_of(steps, over_a_stream, 2)
    assert outcome_of(steps, over_a_stream_one_by_one, 2) == (outcomes, content, 0)
    alone, *_ = outcome_of(steps, over_a_stream)
    assert outcomes == alone


@pytest.mark.parametrize(("way", "replication"), [(over_a_stream, 1), (by_calls, 1), (over_a_stream, 2)])
def test_appends_commit_without_being_prepared(way: Callable[[ExitStack], None], replication: int) -> None:
    *_, quick = outcome_of(QUICK, way, replication)
    assert quick >= 2


@pytest.mark.parametrize(("way", "replication"), [(over_a_stream, 1), (by_calls, 1), (over_a_stream, 2)])
def test_a_plan_that_forgets_a_check_is_caught(
    way: Callable[[ExitStack], None], replication: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(request: pb.AppendRequest, registers: pb.LabelSet) -> pb.LabelSet:
        return of_registers.after(request, registers)

    steps = [*QUICK, Step(check=(("author", "2"),))]
    right, *_ = outcome_of(steps, by_calls_one_by_one)
    for module in (batch, queue):
        monkeypatch.setattr(module, "apply_registers", careless)
    wrong, *_ = outcome_of(steps, way, replication)
    assert right[:-1] == wrong[:-1]
    assert right[-1] != wrong[-1]
