"""Audit records that contradict the brokers' note of them: deleted, replaced, added or restored files."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from coranto.audit import Kind, Report, Severity
from coranto.audit.memory import FOLDER, StoreMemory
from coranto.audit.sealing import Seal
from coranto.audit.witness import BrokerWitness, Statement, Witness, WitnessedFile, update_statement
from coranto.auth import Keys
from coranto.client import JournalClient
from coranto.client.notes import Note
from coranto.errors import CorantoError, CorruptData, EtcdTransactionFailed, InvalidInput
from coranto.testing.cluster import STORE_URL
from coranto.wire.heads_pb2 import NoteRequest
from tests.platform.audit.conftest import Damaged, J, Play, kinds

KEY, OTHER = (base64.b64encode(letter * 32).decode() for letter in (b"k", b"o"))
Files = dict[str, tuple[float, bytes]]


def files_of(journal: Damaged) -> list[str]:
    """Return the files of records, oldest first."""
    return sorted(path for path in journal.world.store.notes if path.startswith(FOLDER))


def delete_newest(notes: Files, before: Files) -> None:
    del notes[max(notes)]


def delete_all(notes: Files, before: Files) -> None:
    notes.clear()


def put_back_copy(notes: Files, before: Files) -> None:
    notes.clear()
    notes.update(before)


def put_older_content_into_newest(notes: Files, before: Files) -> None:
    notes[max(notes)] = before[max(before)]


def add_copy_of_older(notes: Files, before: Files) -> None:
    newest = max(notes)
    notes[f"{newest.removesuffix('.json.gz')}0.json.gz"] = before[max(before)]


def rename_newest(notes: Files, before: Files) -> None:
    newest = max(notes)
    notes[f"{newest.removesuffix('.json.gz')}0.json.gz"] = notes.pop(newest)


@pytest.mark.parametrize(
    "attack",
    [
        delete_newest,
        delete_all,
        put_back_copy,
        put_older_content_into_newest,
        add_copy_of_older,
        rename_newest,
    ],
)
def test_tampered_records_fail_audits_until_they_are_restored(
    play: Play, attack: Callable[[Files, Files], None]
) -> None:
    async def story(journal: Damaged) -> None:
        assert (await journal.audit()).sound
        notes = journal.world.store.notes
        before = dict(notes)
        await journal.fill(3)
        assert (await journal.audit()).sound
        good = dict(notes)
        attack(notes, before)
        # Content written since the older record is lost, and no older record has it.
        found = journal.objects[-2]
        journal.delete(found.fragment)
        for _ in range(2):
            await journal.later()
            report = await journal.audit()
            assert Kind.MEMORY_DAMAGED in kinds(report), attack
            assert not report.sound
        assert files_of(journal) == sorted(notes), "no audit recorded anything"
        notes.clear()
        notes.update(good)
        report = await journal.audit()
        assert Kind.MEMORY_DAMAGED not in kinds(report)
        assert Kind.CONTENT_LOST in kinds(report)
        journal.put(found.fragment, found.data)
        await journal.later()
        assert (await journal.audit()).sound

    play(1, story)


def test_only_an_acceptance_of_all_journals_ends_a_contradiction(play: Play) -> None:
    async def story(journal: Damaged) -> None:
        await journal.cluster.create(journal.spec("shop/other"))
        await journal.later()
        assert (await journal.audit()).sound
        await journal.later()
        assert (await journal.audit()).sound
        delete_newest(journal.world.store.notes, {})
        await journal.audit(f"name={J}", accept="I looked at this one only")
        assert Kind.MEMORY_DAMAGED in kinds(await journal.audit(f"name={J}"))
        report = await journal.audit(accept="the bucket was restored")
        assert Kind.MEMORY_DAMAGED in kinds(report)
        assert Kind.MEMORY_DAMAGED not in kinds(await journal.audit())
        journal.delete(journal.objects[0].fragment)
        await journal.later()
        assert Kind.CONTENT_LOST in kinds(await journal.audit())

    play(1, story)


def test_concurrent_audits_report_no_contradiction(play: Play) -> None:
    async def story(journal: Damaged) -> None:
        await journal.cluster.create(journal.spec("shop/other"))
        await journal.later()

        def fine(report: Report) -> None:
            assert {each.kind for each in report.findings} <= {Kind.FIRST_AUDIT}, report.findings

        for _ in range(4):
            names = ["name=shop/orders", "name=shop/other", "name:prefix=shop/"] * 3
            for report in await asyncio.gather(*(journal.audit(name) for name in names)):
                fine(report)
        fine(await journal.audit())
        assert len({path.split("/")[1] for path in files_of(journal)}) == 1, "all write into one folder"
        assert len(files_of(journal)) < 20

    play(1, story)


def test_an_audit_killed_while_it_writes_causes_no_contradiction(play: Play) -> None:
    async def story(journal: Damaged) -> None:
        assert (await journal.audit()).sound
        store = journal.world.store
        put = store.put_note
        for step in range(2):

            def fail(path: str, content: bytes, step: int = step) -> None:
                if step:
                    put(path, content)
                raise RuntimeError("killed")

            with contextlib.suppress(RuntimeError):
                store.put_note = fail  # type: ignore[method-assign]
                await journal.audit()
            store.put_note = put  # type: ignore[method-assign]
            report = await journal.audit()
            assert report.sound, report.findings
            assert not report.findings

    play(1, story)


def test_a_record_from_before_the_first_witness_is_taken_over(play: Play) -> None:
    async def story(journal: Damaged) -> None:
        memory = StoreMemory(journal.stores.get(STORE_URL))
        assert (await journal.audit_with(memory)).sound
        (old,) = files_of(journal)
        store, put = journal.world.store, journal.world.store.put_note
        for written in (False, True):  # The first audits with a witness are killed while they write.

            def fail(path: str, content: bytes, written: bool = written) -> None:
                if written:
                    put(path, content)
                raise RuntimeError("killed")

            store.put_note = fail  # type: ignore[method-assign]
            with pytest.raises(RuntimeError):
                await journal.audit()
        store.put_note = put  # type: ignore[method-assign]
        journal.delete(journal.objects[0].fragment)
        await journal.later()
        report = await journal.audit()
        assert Kind.CONTENT_LOST in kinds(report)
        assert Kind.FIRST_AUDIT not in report.kinds()
        assert all(path.count("/") == 2 for path in files_of(journal) if path != old)
        await asyncio.sleep(2 * 3600)
        for _ in range(2):
            assert kinds(await journal.audit()) == {Kind.CONTENT_LOST}, "killed audits cause no later contradiction"

    play(1, story)


@dataclass(slots=True)
class _Notes:
    """A client whose brokers keep notes as etcd does, or not at all."""

    auth: Keys | None = None
    kept: Note | None = field(default_factory=Note)

    @property
    def config(self) -> _Notes:
        return self

    async def note(self, request: NoteRequest) -> Note | None:
        if self.kept is None or not request.write:
            return self.kept
        if request.expect_version != self.kept.version:
            raise EtcdTransactionFailed("note", None)  # type: ignore[arg-type]
        self.kept = Note(request.content, self.kept.version + 1)
        return self.kept


def witness(notes: _Notes) -> BrokerWitness:
    client: JournalClient = notes  # type: ignore[assignment]
    return BrokerWitness(client, "file:///", "records")


async def test_a_restored_older_signed_note_is_detected() -> None:
    notes = _Notes(Keys.parse(KEY))
    found = witness(notes)
    file = WitnessedFile("f/1", "abc")
    assert await found.read() == Statement()
    first = await update_statement(found, lambda now: now.announced("f", file))
    assert await found.read() == first
    assert notes.kept is not None
    old = notes.kept.content
    second = await update_statement(found, lambda now: now.confirmed(file, ()))
    assert second.files == (replace(file, written=True),)
    # A caller with a token for its journals, but without a key, restores an earlier note of the brokers.
    notes.kept = Note(old, notes.kept.version + 1)
    statement = await found.read()
    assert statement is not None
    assert "put back" in statement.damage
    notes.kept = Note(b"{}", notes.kept.version + 1)
    statement = await found.read()
    assert statement is not None
    assert "not signed" in statement.damage
    assert statement.number == notes.kept.version
    with pytest.raises(InvalidInput, match="no key"):
        await witness(_Notes(None, Note(old, 1))).read()


async def test_a_change_is_retried_after_a_conflict_and_fails_after_many() -> None:
    class Contended:
        def __init__(self, losses: int) -> None:
            self.losses = losses
            self.kept = Statement()

        async def read(self) -> Statement | None:
            return self.kept

        async def write(self, statement: Statement) -> bool:
            self.losses -= 1
            if self.losses >= 0:
                self.kept = replace(self.kept, number=self.kept.number + 1)
                return False
            self.kept = replace(statement, number=statement.number + 1)
            return True

    contended: Witness = Contended(5)
    assert (await update_statement(contended, lambda now: now.announced("f", WitnessedFile("f/1", "")))).number == 6
    with pytest.raises(CorantoError, match="audit again"):
        await update_statement(Contended(1000), lambda now: now)


async def test_without_notes_there_is_no_witness() -> None:
    assert await witness(_Notes(None, None)).read() is None
    assert not Seal().keys
    with pytest.raises(CorruptData, match="format 9"):
        await witness(_Notes(None, Note(b'{"format": 9, "number": 1}', 1))).read()


def test_the_report_states_that_brokers_keep_no_note(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(journal: Damaged) -> None:
        async def nothing(self: JournalClient, request: NoteRequest) -> None:
            return None

        monkeypatch.setattr(JournalClient, "note", nothing)
        for _ in range(2):
            report = await journal.audit()
            assert report.sound
        (found,) = report.findings
        assert (found.kind, found.severity) == (Kind.MEMORY_UNWITNESSED, Severity.INFO)
        assert all(path.count("/") == 1 for path in files_of(journal))

    play(1, story)
