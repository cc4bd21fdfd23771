"""A checkpoint's offsets and producers are valid in a fork up to the fork offset, and not beyond."""

from __future__ import annotations

import pytest

from coranto.errors import InvalidInput
from coranto.fragments.forks import Fork
from coranto.messages.checkpoints import Checkpoint, ProducerState, Source
from coranto.messages.uuids import ProducerId
from coranto_consumers.forks.checkpoints import fork_checkpoint, promote_checkpoint, require_shared

PRODUCER = ProducerId(b"\x01abcde")
PENDING = Source(70, {PRODUCER: ProducerState(17, 40)})
READ = Checkpoint({"a": PENDING, "b": Source(5)}, {"out": b"ack\n"})
NAMES = {"a": "x/a", "b": "x/b", "c": "x/c"}


def forks(offset: int = 100, begin: int = 0, **fields: bool) -> dict[str, Fork]:
    return {f"x/{name}": Fork(name, f"x/{name}", offset, offset, begin, **fields) for name in ("a", "b", "c")}


def test_a_copy_has_positions_and_pending_messages_but_no_acknowledgements() -> None:
    copy = fork_checkpoint(READ, NAMES)
    assert copy == Checkpoint({"x/a": PENDING, "x/b": Source(5)})
    assert copy.sources["x/a"].producers[PRODUCER].begin == 40
    with pytest.raises(InvalidInput, match="has read b, which has no fork"):
        fork_checkpoint(READ, {"a": "x/a"})


def test_a_fork_must_contain_all_content_that_was_read_or_is_reread() -> None:
    copy = fork_checkpoint(READ, NAMES)
    require_shared(copy, forks(70))
    require_shared(copy, forks() | {"x/a": Fork("a", "x/a", 100, 100, 40)})
    with pytest.raises(InvalidInput, match="x/a: ends the source's content at 69, and the consumer has read up to 70"):
        require_shared(copy, forks(69))
    with pytest.raises(InvalidInput, match="x/a: begins at 41, and the consumer reads on from 40"):
        require_shared(copy, forks(begin=41))


def test_promotion_restores_names_and_keeps_acknowledgements() -> None:
    own = Checkpoint(fork_checkpoint(READ, NAMES).sources, {"new/out": b"own\n"})
    assert promote_checkpoint(own, forks(70)) == Checkpoint({"a": PENDING, "b": Source(5)}, {"new/out": b"own\n"})


def test_a_consumer_that_has_read_other_content_is_not_promoted() -> None:
    own = fork_checkpoint(READ, NAMES)
    with pytest.raises(InvalidInput, match="x/a: differs from a beyond 69, and the consumer has read up to 70"):
        promote_checkpoint(own, forks(69))
    with pytest.raises(InvalidInput, match="has read b, which is not a complete fork that was made for it"):
        promote_checkpoint(Checkpoint({"x/a": PENDING, "b": Source(5)}), {"x/a": forks()["x/a"]})
    with pytest.raises(InvalidInput, match="has read nothing yet"):
        promote_checkpoint(Checkpoint(), {})
    with pytest.raises(InvalidInput, match="x/a: does not have all of its source's content"):
        promote_checkpoint(own, forks(forming=True))
    twice = {"x/a": Fork("a", "x/a", 99, 99, 0), "y/a": Fork("a", "y/a", 99, 99, 0)}
    with pytest.raises(InvalidInput, match="another fork of a"):
        promote_checkpoint(Checkpoint({"x/a": PENDING, "y/a": PENDING}), twice)
