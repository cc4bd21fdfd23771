"""Names: alphabets, lengths in bytes, clean paths, metadata."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.errors import InvalidInput
from coranto.names import (
    PATH_SYMBOLS,
    TOKEN_SYMBOLS,
    is_clean_path,
    strip_metadata,
    validate_journal,
    validate_path,
    validate_process_id,
    validate_shard_id,
    validate_suffix,
    validate_token,
    validate_zone,
)
from coranto.wire import protocol_pb2 as pb

LETTERS = string.ascii_letters + string.digits + "é漢Ω٣ⅷ½"


@given(st.text(alphabet=LETTERS + TOKEN_SYMBOLS, min_size=1, max_size=20))
def test_tokens_of_the_alphabet_are_accepted_unchanged(value: str) -> None:
    assert validate_token("label", value, 1, 200) is value


@given(st.characters(exclude_categories=["L", "N", "Cs"]), st.sampled_from([TOKEN_SYMBOLS, PATH_SYMBOLS]))
def test_every_other_character_is_refused_and_named(char: str, symbols: str) -> None:
    value = f"ab{char}cd"
    if char in symbols:
        assert validate_token("label", value, 1, 200, symbols=symbols) == value
        return
    with pytest.raises(InvalidInput) as caught:
        validate_token("label", value, 1, 200, symbols=symbols)
    assert caught.value.field == "label"
    assert repr(char) in str(caught.value)


@given(st.characters(max_codepoint=0x23))
def test_nothing_at_or_below_the_key_separator_is_ever_allowed(char: str) -> None:
    with pytest.raises(InvalidInput):
        validate_token("name", char, 1, 10, symbols=PATH_SYMBOLS)


def test_lengths_are_bytes_and_inclusive() -> None:
    assert validate_token("zone", "é", 2, 2) == "é"
    with pytest.raises(InvalidInput, match="has 2 bytes; it must have 1 to 1"):
        validate_token("zone", "é", 1, 1)
    with pytest.raises(InvalidInput, match="has 3 bytes"):
        validate_token("zone", "abc", 4, 8)


def test_invalid_unicode_is_refused() -> None:
    with pytest.raises(InvalidInput, match="not valid Unicode"):
        validate_token("name", "ab\ud800", 1, 10)


def test_empty_text_is_allowed_only_if_declared() -> None:
    assert validate_token("postfix", "", 1, 5, allow_empty=True) == ""
    with pytest.raises(InvalidInput):
        validate_token("postfix", "", 1, 5)


@pytest.mark.parametrize(
    ("path", "clean"),
    [
        ("a/b", True),
        ("/a/b", True),
        ("a", True),
        ("a.b/..c", True),
        ("a//b", False),
        ("a/./b", False),
        ("a/../b", False),
        ("../a", False),
        ("a/", False),
        (".", False),
        ("", False),
        ("//a", False),
    ],
)
def test_clean_paths_are_recognized(path: str, clean: bool) -> None:
    assert is_clean_path(path) is clean


@pytest.mark.parametrize(
    "name", ["abcd", "a/b/c", "flights/events/part-000", "a/date=2013-01-01/100%", "é/漢", "a" * 512, ".dot/file"]
)
def test_journal_names_are_accepted(name: str) -> None:
    assert validate_journal(name) == name


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("abc", "has 3 bytes"),
        ("a" * 513, "has 513 bytes"),
        ("/rooted/name", "begins with '/'"),
        ("a/name/", "not a clean path"),
        ("a//name", "not a clean path"),
        ("../../etc/passwd", "not a clean path"),
        ("a name", "character ' '"),
        ("a:name", "character ':'"),
        ("a#name", "character '#'"),
        ("a/name;meta", "carries metadata"),
    ],
)
def test_invalid_journal_names_are_refused(name: str, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem) as caught:
        validate_journal(name)
    assert caught.value.field == "journal"


def test_long_names_are_cut_in_messages() -> None:
    with pytest.raises(InvalidInput) as caught:
        validate_journal("x" * 10_000)
    assert len(str(caught.value)) < 300


def test_metadata_can_be_stripped_from_a_name() -> None:
    name = "a/journal;reader/one=1"
    assert validate_journal(name, allow_metadata=True) == name
    assert strip_metadata("a/journal") == "a/journal"
    assert strip_metadata(name) == "a/journal"
    assert strip_metadata("a/journal;x;y") == "a/journal"


@pytest.mark.parametrize("metadata", ["", "/rooted", "a//b", "a b", "x" * 513, "a;b"])
def test_metadata_must_be_a_clean_path(metadata: str) -> None:
    with pytest.raises(InvalidInput, match="journal metadata"):
        validate_journal(f"a/journal;{metadata}", allow_metadata=True)


def test_metadata_doesnt_make_a_short_name_long_enough() -> None:
    with pytest.raises(InvalidInput, match="has 3 bytes"):
        validate_journal("abc;metadata", allow_metadata=True)


def test_paths_may_be_empty_where_allowed() -> None:
    assert validate_path("path_postfix", "", 1, 512, allow_empty=True) == ""


def test_process_ids_are_validated() -> None:
    good = pb.ProcessSpec.ID(zone="z", suffix="broker-0")
    assert validate_process_id(good) is good
    assert validate_zone("z" * 32)
    assert validate_suffix("s" * 128)
    assert validate_shard_id("a/shard//x/")
    with pytest.raises(InvalidInput, match=r"^zone"):
        validate_process_id(pb.ProcessSpec.ID(zone="", suffix="broker-0"))
    with pytest.raises(InvalidInput, match=r"^suffix"):
        validate_process_id(pb.ProcessSpec.ID(zone="z", suffix="abc"))
    with pytest.raises(InvalidInput):
        validate_zone("a=b")
    with pytest.raises(InvalidInput):
        validate_shard_id("ab%c")
