"""IngestProgress is recorded as changes, with enough complete records to keep reading short."""

from __future__ import annotations

import json

import pytest

from coranto.errors import CorruptData, InvalidInput
from coranto.ingest import progress as module
from coranto.ingest.progress import IngestProgress, next_batch
from coranto.streams.writer.multi_key.numbered import LastBatch


def test_records_restore_the_progress_and_complete_ones_stay_rare() -> None:
    now, found = IngestProgress(), IngestProgress()
    sizes = {True: 0, False: 0}
    for number in range(3000):
        changes = {f"split-{number % 100}": number}
        now = now.after("s", changes, {"split-1": 1} if number == 7 else {}, 2, 1)
        record, complete = now.record(changes, is_first=not number)
        assert complete or number
        sizes[complete] += len(json.dumps(record))
        found.apply({"complete": complete, **record})
    assert (found.splits, found.lost, found.rows, found.dead_letters) == (now.splits, {"split-1": 1}, 6000, 3000)
    assert (found.changed_bytes, found.complete_bytes) == pytest.approx((now.changed_bytes, now.complete_bytes), 0.2)
    assert 0 < sizes[True] < sizes[False] / 2


def test_a_batch_records_only_changes() -> None:
    first = IngestProgress().after("s", {"a": 1}, {}, 1, 0)
    batch = next_batch("loads", LastBatch(0, "", 0, 0), first, {"a": 1}, [])
    assert batch.is_complete
    second = first.after("s", {"b": 2}, {}, 1, 0)
    batch = next_batch("loads", LastBatch(1, "1.a", 0, 0), second, {"b": 2}, [])
    assert not batch.is_complete
    assert batch.line()["splits"] == {"b": 2}
    assert (batch.number, batch.line()["rows"]) == (2, 2)


def test_too_many_splits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_RECORD_BYTES", 2000)
    many = IngestProgress().after("s", {f"split-{number}": number for number in range(100)}, {}, 0, 0)
    with pytest.raises(InvalidInput, match=r"the positions of 100 splits take .* divide the source"):
        many.record({}, is_first=True)


@pytest.mark.parametrize("record", [{}, {"complete": True, "splits": 3}, {"complete": False, "source": "s"}])
def test_invalid_records_are_an_error(record: dict[str, object]) -> None:
    with pytest.raises(CorruptData, match="cannot be read"):
        IngestProgress().apply(record)
