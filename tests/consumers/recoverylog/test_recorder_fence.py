"""The fence of a log survives the loss of all brokers with its registers, and perhaps content."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from coranto.client import JournalClient
from coranto.errors import AppendOutcomeUnknown, CorruptData, Fenced
from coranto.messages.fixed_frame import encode_frame
from coranto.testing.fake_broker import Break, CallPoint, FakeBroker, FakeJournal
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.recoverylog import Author, MemoryAuthority, fence_of
from coranto_consumers.recoverylog.directory import RecordedDirectory
from coranto_consumers.recoverylog.lineage import HistoryPosition
from coranto_consumers.recoverylog.operations import RecordedOperation, author_of

if TYPE_CHECKING:
    from .conftest import Owners

LOG = "recovery/logs/one"


def put(directory: RecordedDirectory, name: str, content: bytes = b"content") -> None:
    with directory.create(name) as file:
        file.write(content)


async def commit(directory: RecordedDirectory, name: str) -> None:
    put(directory, name)
    await directory.recorder.barrier()


def lose_brokers(journal: FakeJournal, kept: int | None = None) -> None:
    """Lose all brokers of the journal: its registers, and its content from `kept`."""
    journal.registers = pb.LabelSet()
    if kept is not None:
        del journal.spool[kept:]


@pytest.fixture
def authority() -> MemoryAuthority:
    return MemoryAuthority()


@pytest.fixture
def journal(broker: FakeBroker) -> FakeJournal:
    return broker.journals[LOG]


async def test_the_owner_restores_its_fence_and_continues(
    journal: FakeJournal, owners: Owners, authority: MemoryAuthority
) -> None:
    owner = await owners.take_over(authority=authority)
    await commit(owner, "a")
    for name in ("b", "c"):
        lose_brokers(journal)
        await commit(owner, name)
        assert journal.registers == fence_of(owner.recorder.author)
    await commit(owner, "d")
    assert set((await owners.peek()).fsm.paths) == {"/a", "/b", "/c", "/d"}
    assert set((await owners.peek(await owner.recorder.hints())).fsm.paths) == {"/a", "/b", "/c", "/d"}


async def test_a_stale_author_that_appends_first_is_fenced_off(
    journal: FakeJournal, owners: Owners, authority: MemoryAuthority
) -> None:
    stale = await owners.take_over(authority=authority)
    await commit(stale, "a")
    owner = await owners.take_over(authority=authority)
    await commit(owner, "b")
    lose_brokers(journal)
    # The empty registers accept the stale append. Its author does not trust it, and does not set the registers.
    with pytest.raises(Fenced, match="not its owner"):
        await commit(stale, "stale")
    assert author_of(journal.registers) is None
    await commit(owner, "c")
    assert journal.registers == fence_of(owner.recorder.author)
    assert set((await owners.peek()).fsm.paths) == {"/a", "/b", "/c"}


async def test_a_stale_author_that_appends_second_is_fenced_off(
    journal: FakeJournal, owners: Owners, authority: MemoryAuthority
) -> None:
    stale = await owners.take_over(authority=authority)
    owner = await owners.take_over(authority=authority)
    lose_brokers(journal)
    await commit(owner, "a")
    with pytest.raises(Fenced, match="fenced off"):
        await commit(stale, "stale")
    assert set((await owners.peek()).fsm.paths) == {"/a"}


async def test_a_stale_author_is_fenced_off_even_if_all_content_of_its_successor_is_lost(
    journal: FakeJournal, owners: Owners, authority: MemoryAuthority
) -> None:
    """Content alone does not show it: the stale append continues the remaining log correctly."""
    stale = await owners.take_over(authority=authority)
    await commit(stale, "a")
    kept = journal.head
    owner = await owners.take_over(authority=authority)
    await commit(owner, "b")
    lose_brokers(journal, kept)
    with pytest.raises(Fenced, match="not its owner"):
        await commit(stale, "stale")
    # The owner cannot continue without its content, nor can the next one take over without an operator.
    with pytest.raises(CorruptData, match=r"lost content|not there any more"):
        await commit(owner, "c")
    with pytest.raises(CorruptData, match=r"content (is|was) lost"):
        await owners.take_over(authority=authority)


def handoff_of(author: Author, seq_no: int, checksum: int) -> bytes:
    return encode_frame(RecordedOperation(seq_no, checksum, author).to_payload())


async def test_a_late_handoff_does_not_take_over_the_log(
    client: JournalClient, journal: FakeJournal, owners: Owners, authority: MemoryAuthority
) -> None:
    """A process hung between its claim and its handoff while another took over. Handoffs check no fence."""
    earlier = await owners.take_over(authority=authority)
    await commit(earlier, "a")
    seen = (await owners.peek()).fsm
    late, place = Author(7), (seen.next_seq_no, seen.next_checksum)
    await authority.claim(late)
    owner = await owners.take_over(authority=authority)
    await commit(owner, "b")
    for name in ("c", "d"):
        await client.append(LOG, handoff_of(late, *place), union_registers=fence_of(late))
        await commit(owner, name)
        assert journal.registers == fence_of(owner.recorder.author)
    assert set((await owners.peek()).fsm.paths) == {"/a", "/b", "/c", "/d"}


async def test_a_handoff_in_sequence_takes_over_a_log_even_from_an_owner_with_an_authority(
    client: JournalClient, journal: FakeJournal, owners: Owners, authority: MemoryAuthority
) -> None:
    """A Gazette process takes over without a claim."""
    owner = await owners.take_over(authority=authority)
    await commit(owner, "a")
    await owners.take_over(author=Author(7))
    with pytest.raises(Fenced, match="taken over by author 0x7"):
        await commit(owner, "b")
    assert journal.registers == fence_of(Author(7))


async def test_a_takeover_during_the_repair_of_a_late_handoff_wins(
    client: JournalClient, journal: FakeJournal, owners: Owners
) -> None:
    class Overtaken(MemoryAuthority):
        """Another author claims and takes over the log during the second query."""

        calls = 0

        async def current(self):  # type: ignore[no-untyped-def]
            self.calls += owner_is_at_work
            if self.calls == 2:
                await owners.take_over(author=Author(9), authority=authority)
            return await super().current()

    owner_is_at_work, authority = 0, Overtaken()
    seen = (await owners.peek()).fsm
    late, place = Author(7), (seen.next_seq_no, seen.next_checksum)
    owner = await owners.take_over(authority=authority)
    await commit(owner, "a")
    await client.append(LOG, handoff_of(late, *place), union_registers=fence_of(late))
    owner_is_at_work = 1
    with pytest.raises(Fenced, match="not its owner"):
        await commit(owner, "b")
    assert journal.registers == fence_of(Author(9))
    assert "/b" not in (await owners.peek()).fsm.paths


@pytest.mark.parametrize("refilled", [False, True])
async def test_the_owner_stops_after_a_loss_of_its_content(
    refilled: bool, broker: FakeBroker, journal: FakeJournal, owners: Owners, authority: MemoryAuthority
) -> None:
    owner = await owners.take_over(authority=authority)
    await commit(owner, "a")
    kept = journal.head
    await commit(owner, "b")
    lose_brokers(journal, kept)
    if refilled:
        await broker.write(LOG, b"z" * 1000)
    with pytest.raises(CorruptData, match="lost content"):
        await commit(owner, "c")


async def test_a_loss_between_an_append_and_its_proof_is_detected(
    journal: FakeJournal, owners: Owners, client: JournalClient
) -> None:
    class Losing(MemoryAuthority):
        lose = False

        async def current(self):  # type: ignore[no-untyped-def]
            if self.lose:
                self.lose = False
                end = journal.head
                lose_brokers(journal, owner.recorder.write_head)
                journal.spool += b"z" * (end - journal.head)
            return await super().current()

    authority = Losing()
    owner = await owners.take_over(authority=authority)
    await commit(owner, "a")
    lose_brokers(journal)
    authority.lose = True
    with pytest.raises(CorruptData, match="lacks content"):
        await commit(owner, "b")


async def test_without_an_authority_a_lost_fence_ends_the_recorder(journal: FakeJournal, owners: Owners) -> None:
    owner = await owners.take_over()
    await commit(owner, "a")
    lose_brokers(journal)
    with pytest.raises(Fenced, match="no authority"):
        await commit(owner, "b")


async def test_a_barrier_without_content_also_checks_the_fence(
    journal: FakeJournal, owners: Owners, authority: MemoryAuthority
) -> None:
    stale = await owners.take_over(authority=authority)
    owner = await owners.take_over(authority=authority)
    lose_brokers(journal)
    with pytest.raises(Fenced):
        await stale.recorder.barrier()
    await owner.recorder.barrier()
    assert journal.registers == fence_of(owner.recorder.author)


async def test_a_takeover_in_the_log_is_detected_even_if_the_authority_lost_it(
    journal: FakeJournal, owners: Owners, authority: MemoryAuthority
) -> None:
    stale = await owners.take_over(authority=authority)
    known = authority.ownership
    await owners.take_over(authority=authority)
    authority.ownership = known
    lose_brokers(journal)
    with pytest.raises(Fenced, match="was taken over by author"):
        await stale.recorder.barrier()


async def test_a_takeover_while_the_fence_is_restored_wins(journal: FakeJournal, owners: Owners) -> None:
    class Slow(MemoryAuthority):
        """The next owner claims the log right after the first or second query of the current one."""

        claim_after = 0

        async def current(self):  # type: ignore[no-untyped-def]
            answer = await super().current()
            self.claim_after -= 1
            if self.claim_after == 0:
                await self.claim(Author(7))
            return answer

    for claim_at in (1, 2):
        authority = Slow()
        owner = await owners.take_over(authority=authority)
        await commit(owner, "a")
        lose_brokers(journal)
        authority.claim_after = claim_at
        if claim_at == 1:
            with pytest.raises(Fenced):
                await commit(owner, "b")
        else:
            # The claim follows the last query, so the next owner finds the append.
            await commit(owner, "b")
            assert "/b" in (await owners.peek()).fsm.paths


async def test_the_fence_is_restored_over_broken_connections(
    broker: FakeBroker, journal: FakeJournal, owners: Owners, authority: MemoryAuthority
) -> None:
    owner = await owners.take_over(authority=authority)
    await commit(owner, "a")
    lose_brokers(journal)
    broker.at(CallPoint.APPEND_APPLIED, Break.CUT, None, Break.CUT)
    await commit(owner, "b")
    await commit(owner, "c")
    assert set((await owners.peek()).fsm.paths) == {"/a", "/b", "/c"}


# -- Lost answers -----------------------------------------------------------------------------------------------------


class Lossy(JournalClient):
    """A client that loses the answer to its next append, applied or not, after running a given action."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self.lose: str = ""
        self.before_error = None

    async def append(self, journal, content, **options):  # type: ignore[no-untyped-def]
        if content and self.lose:
            lose, self.lose = self.lose, ""
            if lose == "answer":
                await super().append(journal, content, **options)
            await self.before_error()
            raise AppendOutcomeUnknown("the answer was lost")
        return await super().append(journal, content, **options)


@pytest.mark.parametrize("lose", ["answer", "append"])
async def test_an_append_with_a_lost_answer_is_searched_for_after_a_takeover(
    lose: str, broker: FakeBroker, owners: Owners, tmp_path
) -> None:
    """With a lost answer and a lost fence, the log itself shows whether the append came first."""
    async with Lossy(broker.endpoint) as lossy:
        owner = await type(owners)(lossy, tmp_path / "lossy", owners._stack).take_over()
        await commit(owner, "a")
        successors = []

        async def take_over() -> None:
            successors.append(await owners.take_over())

        lossy.before_error = take_over
        lossy.lose = lose
        put(owner, "b")
        if lose == "answer":
            await owner.recorder.barrier()
            assert "/b" in successors[0].recorder._fsm.paths
        else:
            with pytest.raises(Fenced):
                await owner.recorder.barrier()
            assert "/b" not in successors[0].recorder._fsm.paths
        put(successors[0], "c")
        await successors[0].recorder.barrier()
        if lose == "answer":
            with pytest.raises(Fenced):
                await commit(owner, "d")
        assert ("/b" in (await owners.peek()).fsm.paths) == (lose == "answer")


def test_a_chain_continues_over_payloads() -> None:
    assert HistoryPosition(1, 0).after(b"123456789") == HistoryPosition(2, 0xE3069283)


async def test_concurrent_authors_never_both_commit(
    journal: FakeJournal, owners: Owners, authority: MemoryAuthority
) -> None:
    """Zombies write all the time, over many losses of all brokers: content reported as durable stays durable."""
    zombies: list[RecordedDirectory] = []
    durable: list[str] = []
    for round_ in range(6):
        owner = await owners.take_over(authority=authority)
        zombies.append(owner)
        for number in range(3):
            if number % 2 == 0:
                lose_brokers(journal)
            name = f"{round_}-{number}"

            async def attempt(directory: RecordedDirectory, name: str = name) -> bool:
                try:
                    await commit(directory, name)
                except Fenced:
                    return False
                return True

            outcomes = await asyncio.gather(*map(attempt, zombies))
            assert outcomes[:-1] == [False] * (len(zombies) - 1)
            if outcomes[-1]:
                durable.append(name)
    # A zombie queries the authority before it restores its fence, so it never fences off the owner.
    assert len(durable) == 18
    assert {path[1:] for path in (await owners.peek()).fsm.paths} == set(durable)
