"""Stored objects with wrong names or lengths, and unknown ones."""

from __future__ import annotations

from dataclasses import replace

from coranto.audit import Kind
from coranto.fragments.fragment import Fragment, sum_of
from tests.platform.audit.conftest import LENGTH, REPLICATIONS, Damaged, J, Play, kinds, one


@REPLICATIONS
def test_a_truncated_fragment_is_found_by_its_length(play: Play, replication: int) -> None:
    async def story(journal: Damaged) -> None:
        assert (await journal.audit()).sound
        stored = journal.objects[2]
        journal.put(stored.fragment, stored.data[:-1])
        for _ in range(2):
            report = await journal.audit()
            assert {Kind.CONTENT_DIFFERS, Kind.CONTENT_LOST} <= kinds(report)
            await journal.later()

    play(replication, story)


def test_objects_with_wrong_names_are_reported(play: Play) -> None:
    async def story(journal: Damaged) -> None:
        assert (await journal.audit()).sound
        sound = journal.objects[0]
        wrong = replace(sound.fragment, sum=sum_of(b"something else"))
        journal.put(wrong, sound.data)
        found = one(await journal.audit(), Kind.CONTENT_REPLACED)
        assert found["span"] == [0, LENGTH]
        assert Kind.CONTENT_DIFFERS in kinds(await journal.deep())
        # Removing the right one of the two loses content.
        journal.delete(sound.fragment)
        for _ in range(2):
            assert not (await journal.audit()).sound
            await journal.later()
        journal.put(sound.fragment, sound.data)
        journal.delete(wrong)
        await journal.later()
        assert not kinds(await journal.deep())
        journal.world.store.notes[f"{J}/backup-of-yesterday"] = journal.world.timeline.time(), b"?"
        report = await journal.audit()
        assert kinds(report) == {Kind.OBJECT_MISNAMED}
        assert report.sound

    play(1, story)


@REPLICATIONS
def test_an_object_beyond_the_head_is_reported_as_lost_consistency(play: Play, replication: int) -> None:
    async def story(journal: Damaged) -> None:
        assert (await journal.audit()).sound
        beyond = Fragment(J, 1 << 30, (1 << 30) + 4, sum_of(b"fake"), journal.objects[0].fragment.codec)
        journal.put(beyond, b"fake")
        assert Kind.OBJECT_UNKNOWN in kinds(await journal.audit())
        await journal.later()
        report = await journal.audit()
        assert Kind.CONSISTENCY_LOST in kinds(report)
        assert not report.sound

    play(replication, story)
