"""The lag of streaming queries, from the progress that Spark reports."""

from __future__ import annotations

import json

from coranto_consumers.spark.streaming.offsets import bytes_behind


def test_journals_of_all_sources_are_counted_and_other_sources_are_not() -> None:
    progress = {
        "sources": [
            {"latestOffset": {"a/one": 100, "a/new": 7}, "endOffset": json.dumps({"a/one": {"offset": 60}})},
            {"latestOffset": json.dumps({"b/one": {"offset": 50, "journal_id": "c1-2"}}), "endOffset": {"b/one": 50}},
            {"latestOffset": "17", "endOffset": "12"},
            {"latestOffset": None, "endOffset": None},
        ]
    }
    assert bytes_behind(progress) == {"a/one": 40, "a/new": 7, "b/one": 0}


def test_a_query_that_has_read_past_an_old_head_is_not_behind() -> None:
    assert bytes_behind({"sources": [{"latestOffset": {"a/one": 10}, "endOffset": {"a/one": 12}}]}) == {"a/one": 0}
