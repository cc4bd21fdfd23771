"""Records of audits: their files, and their digests."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.audit.remembered import (
    FORMAT,
    JournalRecord,
    KnownFragment,
    accepted,
    decode,
    digest_of,
    digest_of_registers,
    encode,
    newest,
)
from coranto.errors import CorruptData
from coranto.labels import label_set

fragments = st.lists(
    st.tuples(st.integers(0, 99), st.integers(100, 199), st.sampled_from(["aa", "bb"]), st.integers(0, 9)).map(
        lambda each: KnownFragment(*each)
    )
)


def record(name: str, at: float = 1.0, known: list[KnownFragment] | None = None) -> JournalRecord:
    return JournalRecord(name, "cluster", 3, 5, at, 200, 150, 3600.0, fragments=known or [], gaps=[(1, 2)])


@given(fragments)
def test_records_round_trip_through_a_file(known: list[KnownFragment]) -> None:
    records = {name: record(name, known=known) for name in ("a/one", "a/two")}
    assert decode(encode(records)).journals == records


def test_records_of_earlier_versions_have_no_numbers_and_no_files() -> None:
    content = encode({"a/one": record("a/one", known=[KnownFragment(0, 3, "aa", 9, 8.0, 0.0, "")])})
    data = json.loads(content)
    (old,) = data["journals"].values()
    del old["sequence"]
    old["fragments"] = [each[:7] for each in old["fragments"]]
    (read,) = decode(json.dumps(data).encode()).journals.values()
    assert read.sequence == 0
    assert read.fragments == [KnownFragment(0, 3, "aa", 9, 8.0)]
    assert newest([{"a/one": replace(read, at=99.0)}, {"a/one": replace(read, sequence=1)}])["a/one"].sequence == 1


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "records of audits"),
        (b"[]", "records of audits"),
        (b'{"journals": {"a/one": {"journal": 3}}}', "records of audits: journals.a/one"),
        (b'{"journals": {}, "format": %d}' % (FORMAT + 1), f"this version reads up to {FORMAT}"),
    ],
)
def test_files_without_records_or_of_a_later_format_are_refused(content: bytes, problem: str) -> None:
    with pytest.raises(CorruptData, match=problem):
        decode(content)


@given(fragments)
def test_a_digest_depends_on_offsets_and_sums_but_not_on_their_order(known: list[KnownFragment]) -> None:
    turned = [each._replace(mod_time=each.mod_time + 1) for each in reversed(known)]
    assert digest_of(turned) == digest_of(known)
    assert digest_of([*known, KnownFragment(0, 200, "cc")]) != digest_of(known)
    assert digest_of_registers(label_set({})) == ""
    assert digest_of_registers(label_set(author="1")) != digest_of_registers(label_set(author="2"))


def test_the_latest_record_of_each_journal_applies() -> None:
    early, late = {"a/one": record("a/one", 1.0), "a/two": record("a/two", 5.0)}, {"a/one": record("a/one", 2.0)}
    assert newest([early, late]) == newest([late, early]) == {"a/one": late["a/one"], "a/two": early["a/two"]}


def test_reasons_for_accepted_losses_are_kept_with_earlier_ones() -> None:
    first = accepted(record("a/one"), record("a/one", 2.0), "it was meant", ["content-lost"], 2.0)
    second = accepted(first, replace(record("a/one"), at=3.0), "again", [], 3.0)
    assert [each.reason for each in second.accepted] == ["it was meant", "again"]
    assert [each.losses for each in second.accepted] == [["content-lost"], []]
    assert second.at == 3.0
