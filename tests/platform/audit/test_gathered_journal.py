"""Fragments as audits record them, and files whose length contradicts their names."""

from __future__ import annotations

from dataclasses import replace

from coranto.audit.gathered_journal import check_file_lengths, file_facts, known
from coranto.fragments.fragment import Codec, Fragment, sum_of

LIVE = Fragment("a/journal", 0, 3, sum_of(b"abc"), Codec.NONE)
STORED = replace(LIVE, codec=Codec.GZIP, backing_store="s3://b/", mod_time=7, path_postfix="date=1", file_bytes=3000)


def test_a_record_names_the_file_of_a_fragment() -> None:
    facts = file_facts("a/journal", [known(LIVE), known(STORED)])
    assert facts["files"] == [LIVE.content_path, STORED.content_path]
    assert facts["stores"] == ["", "s3://b/"]
    assert facts["fragments"] == [f"{0:016x}-{3:016x}-{LIVE.sum.hex()}"] * 2
    assert known(STORED).stored
    assert not known(LIVE).stored


def test_a_file_that_is_too_long_for_its_name_is_not_content() -> None:
    assert check_file_lengths([replace(LIVE, backing_store="s3://b/", file_bytes=4)]).stored == []
    assert check_file_lengths([replace(LIVE, backing_store="s3://b/", file_bytes=3), LIVE]).implausible == []
