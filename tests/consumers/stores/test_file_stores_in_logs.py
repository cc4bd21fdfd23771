"""Stores of any kind in a recovery log: their folders, fences, losses and crashes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coranto.errors import Fenced
from coranto.messages import Checkpoint
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.stores.contract import SHARD, checkpoint, commit
from tests.consumers.stores.in_logs import LOG, CopyingSubject, JsonSubject, LogSubject, SqliteSubject

KINDS = pytest.mark.parametrize("kind", [JsonSubject, SqliteSubject, CopyingSubject])


@KINDS
async def test_an_owner_leaves_no_files_in_its_folder(kind: type[LogSubject], tmp_path: Path) -> None:
    subject = kind(tmp_path)
    store = await subject.open()
    await store.restore_checkpoint(SHARD)
    await commit(store, 100)
    await store.destroy()
    await store.destroy()
    assert os.listdir(tmp_path) == []


@KINDS
async def test_a_restored_owner_that_was_fenced_off_gets_an_error(kind: type[LogSubject], tmp_path: Path) -> None:
    subject = kind(tmp_path)
    old = await subject.open()
    new = await subject.open()
    with pytest.raises(Fenced):
        await old.restore_checkpoint(SHARD)
    assert await new.restore_checkpoint(SHARD) == Checkpoint()


@KINDS
async def test_no_former_owner_commits_after_a_loss_of_all_brokers(kind: type[LogSubject], tmp_path: Path) -> None:
    subject = kind(tmp_path)
    old = await subject.open()
    await old.restore_checkpoint(SHARD)
    await commit(old, 100)
    new = await subject.open()
    await new.restore_checkpoint(SHARD)
    subject.journals.journals[LOG].registers = pb.LabelSet()
    with pytest.raises(Fenced):
        await commit(old, 200)
    await commit(new, 300)
    third = await subject.open()
    assert await third.restore_checkpoint(SHARD) == checkpoint(300)


@KINDS
async def test_every_crash_leaves_the_last_durable_transaction(kind: type[LogSubject], tmp_path: Path) -> None:
    """The log is truncated after each append in turn, as if the owner had stopped there."""
    subject = kind(tmp_path)
    store = await subject.open()
    await store.restore_checkpoint(SHARD)
    durable = {0: 0}
    for number in range(1, 6):
        await subject.add(store, number)
        await commit(store, number)
        durable[len(subject.log)] = number
    appends = [0, *subject.journals.journals[LOG].appends]
    content, numbers = bytes(subject.log), set()
    for end in appends:
        cut = kind(tmp_path / str(end))
        cut.journals.journals[LOG].content += content[:end]
        found = await cut.open()
        restored = await found.restore_checkpoint(SHARD)
        expected = max(number for at, number in durable.items() if at <= end)
        seen = sorted(await subject.numbers(found))
        # An append may count before its owner gets the response.
        assert seen in (list(range(1, expected + 1)), list(range(1, expected + 2)))
        assert restored == (checkpoint(len(seen)) if seen else Checkpoint())
        numbers.add(len(seen))
        await found.destroy()
    assert numbers == set(range(6))
