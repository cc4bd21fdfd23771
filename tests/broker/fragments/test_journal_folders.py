"""Journals' folders of one broker: listings, markers and writes, also with a store that refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog

from coranto.errors import StoreError
from coranto.fragments.fragment import Codec, Fragment, sum_of
from coranto.fragments.journal_folders import MARKER
from coranto.fragments.stores import FragmentStore, StoreRegistry
from coranto_broker.fragments.journal_folders import JournalFolders

URL = "file:///frags/"
OUTER, INNER = "shop/events", "shop/events/eu"


def fragment(journal: str, postfix: str = "") -> Fragment:
    return Fragment(journal, 0, 1, sum_of(b"x"), Codec.NONE, path_postfix=postfix)


@pytest.fixture
def stores(tmp_path: Path) -> StoreRegistry:
    return StoreRegistry(tmp_path)


@pytest.fixture
async def store(stores: StoreRegistry) -> FragmentStore:
    found = stores.get(URL)
    for each in (fragment(OUTER), fragment(OUTER, "old"), fragment(INNER), fragment(INNER, "old")):
        await found.put(each, b"x")
    return found


async def test_listings_are_marked_and_reported_once(stores: StoreRegistry, store: FragmentStore) -> None:
    names = [INNER]
    folders = JournalFolders(stores, lambda journal: names)
    with structlog.testing.capture_logs() as logged:
        for _ in range(2):
            listed = await folders.fragments(OUTER, [URL])
            assert sorted(each.path_postfix for each in listed) == ["", "old"]
            await folders.mark_listed(OUTER, [URL])
    assert [(each["event"], each["other"]) for each in logged] == [("folder.nested_journal_skipped", INNER)]
    marked = {each.path async for each in store.files("shop") if each.path.endswith(MARKER)}
    assert marked == {f"events/{MARKER}", f"events/eu/{MARKER}"}
    # From now on the markers decide, also for brokers that do not know the journals.
    names.clear()
    assert len(await JournalFolders(stores).fragments(OUTER, [URL])) == 2
    assert len(await JournalFolders(stores).fragments(INNER, [URL])) == 2


async def test_a_store_that_refuses_markers_is_listed_and_written_to(
    stores: StoreRegistry, store: FragmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = JournalFolders(stores, lambda journal: [INNER])
    refused: list[str] = []

    async def refuse(journal: str) -> None:
        refused.append(journal)
        raise StoreError("no")

    with monkeypatch.context() as patched:
        patched.setattr(store, "mark", refuse)
        assert len(await folders.fragments(OUTER, [URL])) == 2
        await folders.mark_listed(OUTER, [URL])
        await folders.mark(OUTER, URL)
    assert refused == [OUTER, INNER, OUTER]
    await folders.mark(OUTER, URL)
    assert {each.path async for each in store.files(OUTER)} >= {MARKER}


async def test_postfixes_that_lead_into_another_journals_folder_are_not_used(
    stores: StoreRegistry, store: FragmentStore
) -> None:
    folders = JournalFolders(stores, lambda journal: [f"{journal}/exists"])
    await store.mark(INNER)
    assert folders.own_postfix(OUTER, URL, "eu") == "eu", "nothing was listed yet"
    await folders.fragments(OUTER, [URL])
    for postfix in ("eu", "eu/date=1", "exists", "exists/date=1"):
        assert folders.own_postfix(OUTER, URL, postfix) == ""
    for postfix in ("", "eu-1", "date=1/eu", "exist", "old"):
        assert folders.own_postfix(OUTER, URL, postfix) == postfix
    assert folders.own_postfix(OUTER, "file:///others/", "eu") == "eu"
