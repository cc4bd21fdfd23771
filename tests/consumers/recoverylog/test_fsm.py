"""The state machine. The frames of these tests are counters, so that checksums do not depend on the encoding."""

from __future__ import annotations

from coranto_consumers.recoverylog import ApplyResult, Fsm, Hints, LiveFnode
from coranto_consumers.recoverylog.operations import (
    Author,
    Change,
    Create,
    Fnode,
    Link,
    RecordedOperation,
    SetProperty,
    Unlink,
    Write,
    crc32c,
)
from tests.consumers.recoverylog.histories import LOG, live, segment

APPLIED, NOT_TRACKED = ApplyResult.APPLIED, ApplyResult.NOT_TRACKED


class Machine:
    """A state machine that gets operations at ascending offsets, ten bytes each."""

    def __init__(self, hints: Hints | None = None, offset: int = 0) -> None:
        self.fsm = Fsm(hints or Hints(LOG))
        self.offset = offset

    def take(
        self, change: Change | None, author: int = 100, seq_no: int = 0, checksum: int | None = None
    ) -> ApplyResult:
        """Apply an operation, by default with the next sequence number and checksum."""
        op = RecordedOperation(
            seq_no or self.fsm.next_seq_no,
            self.fsm.next_checksum if checksum is None else checksum,
            Author(author),
            change,
            LOG,
            self.offset,
            self.offset + 10,
        )
        self.offset += 10
        return self.fsm.apply(op, str(op.begin).encode())

    def create(self, path: str, author: int = 100) -> ApplyResult:
        return self.take(Create(path), author)

    def link(self, fnode: int, path: str, author: int = 100) -> ApplyResult:
        return self.take(Link(Fnode(fnode), path), author)

    def unlink(self, fnode: int, path: str, author: int = 100) -> ApplyResult:
        return self.take(Unlink(Fnode(fnode), path), author)

    def write(self, fnode: int, author: int = 100) -> ApplyResult:
        return self.take(Write(Fnode(fnode), 0, 10), author)


def test_a_history_begins_with_the_first_operation_and_checksum_zero() -> None:
    machine = Machine()
    assert machine.take(Create("/a"), seq_no=2) is ApplyResult.WRONG_SEQ_NO
    assert machine.take(Create("/a"), checksum=1) is ApplyResult.WRONG_CHECKSUM
    assert machine.create("/a") is APPLIED
    assert machine.fsm.next_seq_no == 2
    assert machine.fsm.next_checksum == crc32c(0, b"20")
    assert machine.take(Write(Fnode(1), 0, 1), checksum=0) is ApplyResult.WRONG_CHECKSUM
    assert machine.take(None) is APPLIED
    assert machine.fsm.next_seq_no == 3


def test_files_are_created() -> None:
    machine = Machine(Hints(LOG, (), (SetProperty("/property", "x"),)))
    assert machine.create("/a") is APPLIED
    assert machine.create("/a") is ApplyResult.PATH_EXISTS
    assert machine.create("/property") is ApplyResult.PROPERTY_EXISTS
    assert machine.create("/b") is APPLIED
    assert dict(machine.fsm.paths) == {"/a": 1, "/b": 2}
    assert machine.fsm.hints(LOG) == Hints(
        LOG,
        (
            live(segment(100, 1, 1, 0, 10)),
            live(segment(100, 2, 2, 30, 40, checksum=crc32c(0, b"0"))),
        ),
        (SetProperty("/property", "x"),),
    )


def test_a_file_without_hints_is_not_tracked() -> None:
    hints = Hints(LOG, (live(segment(100, 42, 42, 0)), live(segment(100, 44, 44, 0))))
    machine = Machine(Hints(LOG, (live(segment(100, 42, 44, 0)), hints.live_fnodes[1])))
    assert machine.create("/a") is APPLIED
    assert machine.create("/b") is NOT_TRACKED
    assert machine.create("/c") is APPLIED
    assert dict(machine.fsm.paths) == {"/a": 42, "/c": 44}
    assert machine.fsm.live_fnodes == [42, 44]
    assert not machine.fsm.has_hints_left


def test_a_hinted_file_must_be_created_at_its_hinted_position() -> None:
    machine = Machine(Hints(LOG, (live(segment(100, 42, 45, 0)), live(segment(100, 44, 44, 0)))))
    assert machine.create("/a") is APPLIED
    assert machine.write(42) is APPLIED
    assert machine.write(42) is ApplyResult.NOT_HINTED_CREATE
    assert machine.fsm.next_seq_no == 44
    assert machine.create("/b") is APPLIED


def test_files_are_linked() -> None:
    machine = Machine(Hints(LOG, (), (SetProperty("/property", "x"),)))
    machine.create("/a")
    machine.create("/b")
    assert machine.link(1, "/b") is ApplyResult.PATH_EXISTS
    assert machine.link(99, "/b") is ApplyResult.PATH_EXISTS
    assert machine.link(1, "/property") is ApplyResult.PROPERTY_EXISTS
    assert machine.fsm.next_seq_no == 3
    assert machine.link(99, "/new") is NOT_TRACKED
    assert machine.fsm.next_seq_no == 4
    checksum = machine.fsm.next_checksum
    assert machine.link(1, "/new", author=200) is APPLIED
    assert machine.link(2, "/newer") is APPLIED
    assert machine.fsm.paths_of(Fnode(1)) == {"/a", "/new"}
    first, second = machine.fsm.hints(LOG).live_fnodes
    assert first.segments == (segment(100, 1, 1, 0, 10), segment(200, 4, 4, 60, 70, checksum))
    assert [(each.first_seq_no, each.last_seq_no) for each in second.segments] == [(2, 5)]


def test_files_are_removed_with_their_last_path() -> None:
    machine = Machine()
    machine.create("/a")
    machine.create("/b")
    machine.link(2, "/c")
    assert machine.unlink(2, "/nowhere") is ApplyResult.NO_SUCH_LINK
    assert machine.unlink(2, "/a") is ApplyResult.NO_SUCH_LINK
    assert machine.unlink(99, "/a") is NOT_TRACKED
    assert machine.unlink(2, "/b") is APPLIED
    assert dict(machine.fsm.paths) == {"/a": 1, "/c": 2}
    assert machine.fsm.hints(LOG).live_fnodes[1].segments[0].last_seq_no == 5
    assert machine.unlink(2, "/c") is APPLIED
    assert machine.fsm.live_fnodes == [1]
    assert machine.unlink(1, "/a") is APPLIED
    assert machine.fsm.live_fnodes == []
    assert machine.fsm.hints(LOG) == Hints(LOG)


def test_properties_are_set_and_changed() -> None:
    machine = Machine()
    machine.create("/a")
    assert machine.take(SetProperty("/p", "one")) is APPLIED
    assert machine.take(SetProperty("/a", "two")) is ApplyResult.PATH_EXISTS
    assert machine.take(SetProperty("/p", "three")) is APPLIED
    assert machine.fsm.properties == {"/p": "three"}


def test_writes_extend_the_segments_of_their_file() -> None:
    machine = Machine()
    machine.create("/a")
    assert machine.write(1) is APPLIED
    assert machine.write(15) is NOT_TRACKED
    assert machine.write(1) is APPLIED
    assert machine.fsm.hints(LOG).live_fnodes == (live(segment(100, 1, 4, 0, 40)),)


def test_hints_select_one_history_among_several_authors() -> None:
    hints = Hints(
        LOG,
        (
            LiveFnode(
                Fnode(42),
                (segment(100, 42, 42, 0), segment(200, 44, 44, 0), segment(300, 45, 45, 0), segment(400, 46, 47, 0)),
            ),
        ),
    )
    machine = Machine(hints)
    assert machine.take(Create("/a"), author=666) is ApplyResult.NOT_HINTED_AUTHOR
    assert machine.create("/a", author=100) is APPLIED
    # Operation 43 is skipped: the next hinted one is 44 of author 200, and its checksum is in the hints.
    assert machine.fsm.next_seq_no == 44
    assert machine.write(42, author=100) is ApplyResult.NOT_HINTED_AUTHOR
    assert machine.take(Write(Fnode(42), 0, 1), author=200, seq_no=43) is ApplyResult.WRONG_SEQ_NO
    assert machine.write(42, author=200) is APPLIED
    assert machine.write(42, author=666) is ApplyResult.NOT_HINTED_AUTHOR
    assert machine.write(42, author=300) is APPLIED
    assert machine.write(42, author=300) is ApplyResult.NOT_HINTED_AUTHOR
    assert machine.write(42, author=400) is APPLIED
    assert machine.fsm.has_hints_left
    assert machine.write(42, author=400) is APPLIED
    assert not machine.fsm.has_hints_left
    found = [(each.author, each.first_seq_no, each.last_seq_no) for each in machine.fsm.hints(LOG).live_segments()]
    assert found == [(100, 42, 42), (200, 44, 44), (300, 45, 45), (400, 46, 47)]
    assert machine.write(42, author=666) is APPLIED


def test_a_file_removed_between_segments_stays_removed() -> None:
    first = Machine()
    first.create("/a")
    first.create("/b")
    first.take(SetProperty("/p", "early"))
    first.write(1)
    first.unlink(2, "/b")  # In no segment of a live file.
    first.take(SetProperty("/p", "late"))
    first.link(1, "/b", author=200)
    second = Machine(first.fsm.hints(LOG))
    assert second.create("/a") is APPLIED
    assert second.create("/b") is NOT_TRACKED
    assert second.take(SetProperty("/p", "early")) is NOT_TRACKED
    assert second.write(1) is APPLIED
    assert second.fsm.next_seq_no == 7
    second.offset = 60  # Frames count offsets.
    assert second.link(1, "/b", author=200) is APPLIED
    assert dict(second.fsm.paths) == {"/a": 1, "/b": 1}
    assert second.fsm.properties == {"/p": "late"}
    assert second.fsm.next_checksum == first.fsm.next_checksum


def test_hints_rebuild_their_state() -> None:
    first = Machine()
    for path in ("/a", "/b", "/c"):
        first.create(path)
    first.write(2)
    first.unlink(1, "/a")
    first.write(3)
    second = Machine(first.fsm.hints(LOG), offset=10)  # The file of the first operation was removed.
    second.create("/b")
    second.create("/c")
    second.write(2)
    assert second.unlink(1, "/a") is NOT_TRACKED
    second.write(3)
    assert second.fsm.hints(LOG) == first.fsm.hints(LOG)
    assert (second.fsm.next_seq_no, second.fsm.next_checksum) == (first.fsm.next_seq_no, first.fsm.next_checksum)
