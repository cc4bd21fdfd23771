"""The records that audits keep in a store: lost, moved, and dated ahead."""

from __future__ import annotations

import gzip
from dataclasses import replace

from coranto.audit import Kind
from coranto.audit.memory import StoreMemory
from coranto.audit.remembered import decode, encode
from coranto.testing.cluster import STORE_URL
from coranto.wire import protocol_pb2 as pb
from tests.platform.audit.conftest import Damaged, J, Play, kinds


def test_lost_records_are_reported(play: Play) -> None:
    async def story(journal: Damaged) -> None:
        memory = StoreMemory(journal.stores.get(STORE_URL))
        assert (await journal.audit_with(memory)).sound
        notes = journal.world.store.notes
        for path, (at, content) in list(notes.items()):
            notes[path] = at, content[:-4]
        report = await journal.audit_with(memory)
        assert Kind.MEMORY_DAMAGED in kinds(report)
        assert not report.sound
        notes.clear()
        report = await journal.audit_with(memory)
        assert report.kinds() == {Kind.FIRST_AUDIT, Kind.MEMORY_UNWITNESSED}
        journal.delete(journal.objects[0].fragment)
        notes.clear()
        await journal.later()
        assert not (await journal.audit_with(memory)).sound

    play(1, story)


def test_records_are_found_after_another_store_becomes_the_first(play: Play) -> None:
    async def story(journal: Damaged) -> None:
        assert (await journal.audit()).sound
        (info,) = (await journal.client.list(f"name={J}")).journals
        stores = ["file:///other/", *info.spec.fragment.stores]
        del info.spec.fragment.stores[:]
        info.spec.fragment.stores.extend(stores)
        await journal.client.apply([pb.ApplyRequest.Change(upsert=info.spec, expect_mod_revision=info.mod_revision)])
        journal.delete(journal.objects[0].fragment)
        await journal.later()
        assert Kind.CONTENT_LOST in kinds(await journal.audit())

    play(1, story)


def test_a_record_dated_in_the_future_is_reported(play: Play) -> None:
    async def story(journal: Damaged) -> None:
        assert (await journal.audit()).sound
        notes = journal.world.store.notes
        ((path, (at, content)),) = notes.items()
        (record,) = decode(gzip.decompress(content)).journals.values()
        forged = replace(record, at=record.at + 86_400, fragments=[], head=0, persisted_head=0, first=record.head)
        notes[path] = at, gzip.compress(encode({J: forged}))
        journal.delete(journal.objects[0].fragment)
        await journal.later()
        for _ in range(2):
            report = await journal.audit()
            assert Kind.MEMORY_DAMAGED in kinds(report)
            assert not report.sound

    play(1, story)
