"""An input that was read ahead is used if it is the requested one, and closed otherwise."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from coranto.messages.checkpoints import Source
from coranto_consumers.journals.discovery import ContentExtent
from coranto_consumers.journals.ranges import Range
from coranto_consumers.spark.consumer.prefetch import NextInput, PlannedInput, Prefetcher

FIRST = PlannedInput.of([Range("a", 0, 10, 50)], {"a": Source(0), "other": Source(7)})
SECOND = PlannedInput.of([Range("a", 10, 20, 50)], {"a": Source(10)})


class Inputs:
    """Open inputs, and record the open ones."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.failing = False
        self.thread = ""

    @contextmanager
    def read(self, name: str) -> Iterator[str]:
        if self.failing:
            raise ValueError(f"{name} cannot be read")
        self.thread = threading.current_thread().name
        self.open.append(name)
        try:
            yield name
        finally:
            self.open.remove(name)


def following(planned: PlannedInput, reading, extents=None):
    return lambda: NextInput(planned, reading, extents)


def test_an_input_read_in_a_thread_is_taken_once_and_closed_by_its_taker():
    inputs = Inputs()
    with Prefetcher[str]() as ahead:
        assert ahead.take(FIRST) is None
        ahead.begin(following(FIRST, inputs.read("first")))
        taken = ahead.take(PlannedInput.of([Range("a", 0, 10, 50)], {"a": Source(0), "other": Source(8)}))
        assert taken is not None, "states of other journals do not matter"
        assert ahead.take(FIRST) is None
        with taken as found:
            assert (found, inputs.open) == ("first", ["first"])
        assert inputs.open == []
    assert inputs.thread != threading.current_thread().name


def test_an_unwanted_input_is_closed():
    inputs = Inputs()
    with Prefetcher[str]() as ahead:
        ahead.begin(following(FIRST, inputs.read("first")))
        assert ahead.take(SECOND) is None
        assert inputs.open == []
        ahead.begin(following(FIRST, inputs.read("first")))
        ahead.begin(following(SECOND, inputs.read("second")))
    assert inputs.open == []


def test_an_input_for_other_source_states_is_not_used():
    inputs = Inputs()
    with Prefetcher[str]() as ahead:
        ahead.begin(following(FIRST, inputs.read("first")))
        assert ahead.take(PlannedInput(FIRST.ranges, {"a": Source(1)})) is None


def test_a_prefetch_may_include_extents_or_find_nothing():
    inputs = Inputs()
    with Prefetcher[str]() as ahead:
        assert ahead.extents() is None
        ahead.begin(following(FIRST, inputs.read("first")))
        assert ahead.extents() is None
        ahead.begin(following(FIRST, inputs.read("first"), {"a": ContentExtent(0, 50)}))
        assert ahead.extents() == {"a": ContentExtent(0, 50)}
        assert ahead.take(FIRST) is not None
        assert ahead.extents() is None
        ahead.begin(lambda: None)
        assert (ahead.extents(), ahead.take(FIRST)) == (None, None)


def unplanned():
    raise ValueError("no answer")


def test_only_the_taker_of_an_input_gets_its_errors():
    inputs = Inputs()
    inputs.failing = True
    with Prefetcher[str]() as ahead:
        ahead.begin(following(FIRST, inputs.read("first")))
        taken = ahead.take(FIRST)
        assert taken is not None
        with pytest.raises(ValueError, match="first cannot be read"), taken:
            pass
        ahead.begin(unplanned)
        assert (ahead.extents(), ahead.take(FIRST)) == (None, None)
        ahead.begin(following(SECOND, inputs.read("second")))
