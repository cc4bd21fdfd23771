"""The catalog: the versions that records register, including hostile records, and the rules for the next version."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.errors import CorruptData, IncompatibleType, InvalidInput, MessageTypeNotFound
from coranto.types import catalog as catalog_module
from coranto.types.catalog import Catalog, TypeVersion
from coranto.types.compatibility import Compatibility
from coranto.types.definitions import JsonForm, MessageType
from coranto.types.parsing import parse_fields
from coranto.types.references import parse_reference


def version(number: int, fields: str = "id BIGINT", name: str = "shop.Order", promise=Compatibility.BACKWARD):
    return TypeVersion(number, MessageType(name, JsonForm(), parse_fields(fields)), promise, 1000.0 + number)


def catalog_of(*lines: bytes) -> Catalog:
    catalog = Catalog("types/registry")
    for line in lines:
        catalog.feed(line)
    return catalog


def find(catalog: Catalog, text: str) -> TypeVersion:
    return catalog.find(parse_reference(text))


ONE, TWO = version(1), version(2, "id BIGINT, x INT")


def test_records_are_versions_in_order():
    catalog = catalog_of(ONE.to_line(), version(1, name="a").to_line(), TWO.to_line())
    assert catalog.names == ("a", "shop.Order")
    assert find(catalog, "shop.Order") == TWO == find(catalog, "shop.Order@2")
    assert find(catalog, "shop.Order@1") == ONE
    assert catalog.history("shop.Order") == (ONE, TWO)
    assert catalog.strays == []
    with pytest.raises(MessageTypeNotFound, match=r"no message type shop\.Order@3; it has shop\.Order@1, shop\."):
        find(catalog, "shop.Order@3")
    with pytest.raises(MessageTypeNotFound, match=r"no message type b; it has a, shop\.Order"):
        find(catalog, "b")


@given(st.lists(st.integers(1, 60), min_size=1, max_size=20))
def test_content_may_be_fed_in_any_pieces(sizes):
    content = ONE.to_line() + b"junk\n" + TWO.to_line()
    catalog = Catalog("types/registry")
    for size in sizes:
        catalog.feed(content[catalog.offset : catalog.offset + size])
    catalog.feed(content[catalog.offset :])
    assert catalog.history("shop.Order") == (ONE, TWO)
    assert [(each.offset, each.problem) for each in catalog.strays] == [(len(ONE.to_line()), "not JSON")]
    assert catalog.is_whole
    assert catalog.offset == len(content)


def record(**changes) -> bytes:
    found = {**json.loads(TWO.to_line()), **changes}
    return json.dumps(found).encode() + b"\n"


STRAYS = {
    "no JSON": (b"{'registry': 1}\n", "not JSON"),
    "not UTF-8": (b'{"registry": "\xff"}\n', "not JSON"),
    "nested without end": (b"[" * 100_000 + b"\n", "not JSON"),
    "a long number": (b'{"registry": ' + b"9" * 5000 + b"}\n", "not JSON"),
    "another object": (b'{"order": 7}\n', "no record"),
    "a list": (b"[1]\n", "no record"),
    "no type": (record(type=None), "'' has 0 bytes"),
    "a type of a long name": (record(type="x" * 1000), "has 1000 bytes; it must have 1 to 256"),
    "a version too early": (record(version=1), "version 1 of shop.Order, where 2 is next"),
    "a version too late": (record(version=99), "version 99 of shop.Order, where 2 is next"),
    "a version that is none": (record(version=True), "version True of shop.Order"),
    "a version of text": (record(version="2"), "version 2 of shop.Order"),
}


@pytest.mark.parametrize("case", STRAYS)
def test_invalid_lines_are_skipped_and_reported(case):
    line, problem = STRAYS[case]
    catalog = catalog_of(ONE.to_line(), line, TWO.to_line())
    assert catalog.history("shop.Order") == (ONE, TWO)
    assert [each.offset for each in catalog.strays] == [len(ONE.to_line())]
    assert problem in catalog.strays[0].problem


def test_a_giant_line_is_skipped_without_buffering_it(monkeypatch):
    monkeypatch.setattr(catalog_module, "MAX_RECORD_BYTES", 1000)
    catalog = catalog_of(ONE.to_line())
    for _ in range(50):
        catalog.feed(b"x" * 100)
    assert not catalog.is_whole or catalog.stray_count
    catalog.feed(b"\n" + TWO.to_line())
    assert catalog.history("shop.Order") == (ONE, TWO)
    assert [(each.offset, each.problem) for each in catalog.strays] == [
        (len(ONE.to_line()), "a line of more than 1000 bytes")
    ]
    with pytest.raises(InvalidInput, match=r"the record of shop\.Order has .* bytes, and may have 1000"):
        version(3, ", ".join(f"f{n} INT" for n in range(100))).to_line()


def test_the_number_of_kept_strays_is_bounded():
    catalog = catalog_of(b"junk\n" * 250)
    assert (catalog.stray_count, len(catalog.strays)) == (250, 100)


def test_a_record_of_a_later_format_ends_the_fold():
    for found_format in (2, "1", None, [1]):
        with pytest.raises(CorruptData, match=r"types/registry at offset 0: a record of the format .* later version"):
            catalog_of(record(registry=found_format))


def test_no_content_is_accepted_after_a_record_of_a_later_format():
    """A program that retries must not treat its incomplete catalog as complete."""
    catalog = catalog_of(ONE.to_line())
    for content in (record(registry=2), b"", TWO.to_line()):
        with pytest.raises(CorruptData, match=f"at offset {len(ONE.to_line())}: a record of the format 2"):
            catalog.feed(content)


NOT_UNDERSTOOD = {
    "a type of the future": record(definition={**TWO.definition.to_plain(), "fields": {"id": "VARIANT"}}),
    "a framing of the future": record(definition={"type": "shop.Order", "framing": "avro"}),
    "a promise of the future": record(compatibility="TRANSITIVE"),
    "a definition of another type": record(definition=version(1, name="other").definition.to_plain()),
    "no definition": record(definition=None),
    "no time": record(time="now"),
    "a time without end": record(time=float("inf")),
    "a time beyond all floats": record(time=10**400),
}


@pytest.mark.parametrize("case", NOT_UNDERSTOOD)
def test_an_unreadable_version_blocks_only_its_type(case):
    catalog = catalog_of(
        ONE.to_line(), NOT_UNDERSTOOD[case], version(3, "id BIGINT, y INT").to_line(), version(1, name="a").to_line()
    )
    assert find(catalog, "shop.Order@1") == ONE
    assert find(catalog, "a") == version(1, name="a")
    for text in ("shop.Order", "shop.Order@2", "shop.Order@3"):
        with pytest.raises(CorruptData, match=r"version 2 of shop\.Order cannot be understood: .* by its number"):
            find(catalog, text)
    with pytest.raises(CorruptData, match="version 2"):
        catalog.next_version(ONE.definition, None, 0.0)
    assert "version 2" in catalog.problem_of("shop.Order")
    assert catalog.problem_of("a") == ""


def test_a_type_without_a_readable_version_advises_no_earlier_one():
    catalog = catalog_of(record(version=1, time="now"))
    assert catalog.problem_of("shop.Order").endswith(
        "Use a later version of Coranto; if none wrote this record, give the type another name"
    )
    assert catalog.history("shop.Order") == ()


@given(st.lists(st.one_of(st.binary(max_size=40), st.sampled_from([*NOT_UNDERSTOOD.values(), ONE.to_line()]))))
def test_any_content_is_folded_or_refused_as_corrupt(pieces):
    catalog = Catalog("types/registry")
    for piece in pieces:
        catalog.feed(piece)
        for name in catalog.names:
            assert [each.number for each in catalog.history(name)] == [*range(1, len(catalog.history(name)) + 1)]


# -- The next version --------------------------------------------------------------------------------------------------


def following(catalog: Catalog, fields: str, promise: Compatibility | None = None) -> TypeVersion | None:
    return catalog.next_version(MessageType("shop.Order", JsonForm(), parse_fields(fields)), promise, 5.0)


def test_a_definition_of_any_version_is_not_registered_again():
    catalog = catalog_of(ONE.to_line(), TWO.to_line())
    assert following(catalog, "id BIGINT, x INT") is None
    assert following(catalog, "id BIGINT") is None
    assert catalog.version_of(ONE.definition) == ONE
    found = following(catalog, "x INT")
    assert found is not None
    assert (found.number, found.compatibility, found.time) == (3, Compatibility.BACKWARD, 5.0)


def test_a_version_is_checked_against_all_earlier_ones_with_one_problem_per_place():
    catalog = catalog_of(ONE.to_line(), version(2, "x INT").to_line(), version(3, "x BIGINT").to_line())
    with pytest.raises(IncompatibleType) as error:
        following(catalog, "x STRING, id STRING")
    # Version 3 had no id, but journals still have messages of version 1.
    assert [text.split(":")[0] for text in error.value.problems] == [
        "x is STRING in the new version, which does not hold BIGINT of version 3",
        "id is STRING in the new version, which does not hold BIGINT of version 1",
    ]
    assert "shop.Order is not BACKWARD compatible with its earlier versions" in str(error.value)


def test_none_restarts_the_checks_and_keeps_the_compatibility():
    catalog = catalog_of(version(1, promise=Compatibility.FULL).to_line())
    found = following(catalog, "id STRING", Compatibility.NONE)
    assert found is not None
    catalog.feed(found.to_line())
    assert catalog.promise_of("shop.Order") is Compatibility.FULL
    assert following(catalog, "id STRING, x INT") is not None  # Version 1 no longer counts.
    with pytest.raises(IncompatibleType, match="not FULL compatible"):
        following(catalog, "id DATE")


def test_a_definition_from_before_a_none_becomes_a_new_version():
    """Its messages would break readers of the version after the restart. Returning to it is another restart."""
    cut = version(2, "id STRING", promise=Compatibility.NONE)
    catalog = catalog_of(ONE.to_line(), cut.to_line())
    assert catalog.version_of(ONE.definition) is None
    with pytest.raises(IncompatibleType, match="does not hold STRING of version 2"):
        following(catalog, "id BIGINT")
    back = following(catalog, "id BIGINT", Compatibility.NONE)
    assert back is not None
    assert back.number == 3
    catalog.feed(back.to_line())
    assert following(catalog, "id BIGINT") is None


def test_a_compatibility_applies_until_another_one_is_given():
    catalog = catalog_of(version(1, "id INT", promise=Compatibility.FULL).to_line())
    with pytest.raises(IncompatibleType, match="FULL"):
        following(catalog, "id BIGINT")
    assert following(catalog, "id BIGINT", Compatibility.BACKWARD) is not None
    assert Catalog("types/registry").promise_of("new") is Compatibility.BACKWARD
