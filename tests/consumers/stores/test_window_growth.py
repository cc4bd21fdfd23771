"""Windows that grow with stored content."""

from __future__ import annotations

from pathlib import Path

import pytest

from coranto.client import SyncJournalClient
from coranto.errors import CorruptData, InvalidInput
from coranto.fragments.windows import Span
from coranto_consumers.stores import SqlStore
from coranto_consumers.stores.window_growth import grow
from coranto_consumers.stores.windows import WindowLog

ONE, TWO = "w/events/one", "w/events/two"


@pytest.fixture
def log(tmp_path: Path) -> WindowLog:
    return WindowLog(SqlStore(f"sqlite:///{tmp_path}/store.db"), "c")


SELECTOR = "name:prefix=w/events/"
ROW = b'{"n": 1}\n'


def test_windows_consist_of_stored_content_and_end_with_lines(broker, log, tmp_path) -> None:
    broker.create(ONE, TWO)
    one, two = (broker.fake.journals[name] for name in (ONE, TWO))
    with SyncJournalClient.of(broker.config) as client:

        def names(**options) -> list[str]:
            return [each.window.name for each in grow(log, client, [SELECTOR], **options)]

        assert names(partial=True) == []
        broker.write(ONE, ROW * 3)
        broker.write(TWO, ROW)
        assert names(partial=True) == [], "only brokers have the content"
        one.roll(tmp_path)
        two.roll(tmp_path)
        assert names(window_bytes=1_000) == [], "it does not fill a window"
        assert names(window_bytes=1_000, partial=True) == ["00000001"]
        assert names(partial=True) == ["00000001"]

        broker.write(ONE, ROW[:4])
        one.roll(tmp_path)
        assert names(partial=True) == ["00000001"], "a line is unfinished"
        broker.write(ONE, ROW[4:])
        one.roll(tmp_path)
        found = grow(log, client, [SELECTOR], partial=True)
        size = len(ROW)
        spans = [dict(each.window.spans) for each in found]
        assert spans == [
            {ONE: Span(0, 3 * size, one.create_revision), TWO: Span(0, size, two.create_revision)},
            {ONE: Span(3 * size, 4 * size, one.create_revision)},
        ]

        for _ in range(4):
            broker.write(TWO, ROW)
            two.roll(tmp_path)
        assert names(window_bytes=size, max_windows=4) == [
            "00000001", "00000002-00000004", "00000005", "00000006",
        ]  # fmt: skip


def test_lost_and_recreated_journals_stop_the_growth_of_windows(broker, log, tmp_path) -> None:
    broker.create(ONE)
    with SyncJournalClient.of(broker.config) as client:
        broker.write(ONE, ROW)
        broker.fake.journals[ONE].roll(tmp_path)
        grow(log, client, [SELECTOR], partial=True)
        broker.write(ONE, ROW)
        gone = broker.fake.journals[ONE].roll(tmp_path)
        broker.write(ONE, ROW)
        broker.fake.journals[ONE].roll(tmp_path)
        broker.fake.journals[ONE].drop_before(gone.end)
        with pytest.raises(CorruptData, match="is gone, and no window covers it"):
            grow(log, client, [SELECTOR], partial=True)
        broker.create(ONE)
        with pytest.raises(CorruptData, match="deleted and created again"):
            grow(log, client, [SELECTOR], partial=True)
        with pytest.raises(InvalidInput, match="no journal matches"):
            grow(log, client, ["name:prefix=other/"])
