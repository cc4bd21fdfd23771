"""Records of the progress of webhooks: a process that reads them has the same keys and gateways."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from coranto.errors import CorruptData
from coranto.ingest.gateway.progress import GATEWAY_SECONDS, WebhookProgress
from coranto.ingest.webhook.keys import DeduplicationWindow, pack


def new(seconds: float) -> WebhookProgress:
    return WebhookProgress(keys=DeduplicationWindow(seconds), seconds=seconds)


def test_records_since_a_complete_one_restore_the_progress() -> None:
    chance, progress, records = random.Random(1), new(3600.0), list[Any]()
    for number in range(4000):
        at = 1000.0 + number
        keys = pack((chance.randbytes(16), chance.randbytes(8)) for _ in range(3))
        after = progress.after("webhook", {f"gateway-{number % 2}": [number, at]}, {}, 3, 0)
        after.at, after.new = at, keys
        record, is_complete = after.record({f"gateway-{number % 2}": [number, at]}, is_first=not number)
        records.append(json.loads(json.dumps({"batch": number, "complete": is_complete, **record})))
        after.keys.add(at, keys)
        after.keys.expire(at)
        progress = after
    complete = [number for number, each in enumerate(records) if each["complete"]]
    assert 2 < len(complete) < 40
    copy = new(3600.0)
    for record in records[complete[-1] :]:
        copy.apply(record)
    copy.keys.expire(progress.at)
    assert dict(copy.keys.batches()) == dict(progress.keys.batches())
    assert len(copy.keys) == 3 * 3601
    assert (copy.splits, copy.rows) == (progress.splits, 12000)
    assert (copy.number_of("gateway-1"), copy.number_of("other")) == (3999, 0)


def test_old_gateways_are_forgotten() -> None:
    progress = new(10.0).after("webhook", {"old": [7, 1000.0], "new": [1, 1001.0 + GATEWAY_SECONDS]}, {}, 1, 0)
    progress.at = 1001.0 + GATEWAY_SECONDS
    record, _ = progress.record({}, is_first=True)
    assert record["splits"] == {"new": [1, 1001.0 + GATEWAY_SECONDS]}


def test_records_of_another_ingest_are_corrupt() -> None:
    with pytest.raises(CorruptData, match="another ingest wrote it"):
        new(1.0).apply({"complete": True, "source": "x", "splits": {}, "lost": {}, "rows": 0, "letters": 0})
