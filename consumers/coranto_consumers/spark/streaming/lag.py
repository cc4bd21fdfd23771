"""The lag of streaming queries, from the progress that Spark reports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from coranto.offsets import offset_of_json
from coranto_consumers.spark.session.versions import require_spark
from coranto_consumers.spark.streaming.offsets import loads


def bytes_behind(progress: Any) -> dict[str, int]:
    """Return the bytes of each journal that a query has not read yet, over all of its sources.

    `progress` is an item of `query.recentProgress`, or its JSON. Raises VersionTooOld before Spark 4.2, which lacks
    heads.
    """
    require_spark("bytes_behind", (4, 2))
    raw = progress if isinstance(progress, Mapping) else json.loads(progress.json)
    behind = {}
    for source in raw["sources"]:
        heads, ends = _journals(source["latestOffset"]), _journals(source["endOffset"])
        if not isinstance(heads, dict) or not isinstance(ends, dict):
            continue  # This source reads something else than journals.
        positions = loads(ends)
        for journal, head in heads.items():
            read = positions[journal].offset if journal in positions else 0
            behind[journal] = max(0, offset_of_json(head) - read)
    return behind


def _journals(offsets: object) -> object:
    return json.loads(offsets) if isinstance(offsets, str) else offsets
