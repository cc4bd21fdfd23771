"""Ingest files: their content, and errors with the line."""

from __future__ import annotations

import re

import pytest

from coranto.errors import InvalidInput
from coranto.ingest.files.options import FileOptions
from coranto.ingest.spec import NewStream, read_spec

FILES = """
name: orders
stream: shop/orders
source:
  files: {url: "file:///data/orders/", pattern: "*.csv", format: csv, columns: {n: integer}, delimiter: tab}
key: customer
poison: dead letters
batch: {bytes: 1000, seconds: 0.5}
create: {segments: 4, replication: 1, stores: ["file:///"]}
type: shop.Order
registry: types/registry
"""


def test_files() -> None:
    spec = read_spec(FILES, {})
    assert (spec.name, spec.stream, spec.kind, spec.key) == ("orders", "shop/orders", "files", "customer")
    assert spec.options == FileOptions("file:///data/orders/", "*.csv", "csv", {"n": "integer"}, "\t")
    assert (spec.keeps_poison, spec.batch_bytes, spec.batch_seconds) == (True, 1000, 0.5)
    assert spec.create == NewStream(4, 1, ("file:///",))
    assert (spec.type, spec.registry) == ("shop.Order", "types/registry")


def test_defaults() -> None:
    spec = read_spec('{name: a, stream: b, source: {kafka: {brokers: "k:9092", topics: [t]}}}', {})
    assert (spec.keeps_poison, spec.batch_bytes, spec.batch_seconds, spec.create) == (False, 4 << 20, 1.0, None)
    assert spec.options.meta == ("topic", "partition", "offset", "timestamp")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("name: orders", ""), "line 3: the field 'name' is missing"),
        (("name: orders", "name: a b"), "line 2: 'a b' cannot name a writer of batches"),
        (("stream: shop/orders", "stream: //"), "line 3: "),
        (("poison: dead letters", "poison: drop"), "line 7: poison is 'drop'; it may be fail, dead letters"),
        (("bytes: 1000", "bytes: 0"), "line 8: bytes is 0; it may be 1 to"),
        (("seconds: 0.5", "seconds: soon"), "line 8: "),
        (("seconds: 0.5", "seconds: nan"), "line 8: nan is not a time between"),
        (("format: csv", "format: xml"), "line 5: format is 'xml'; it may be json, csv, parquet"),
        (("n: integer", "n: int"), "line 5: column n has the type 'int'"),
        (("delimiter: tab", "delimiter: ;;"), "line 5: ';;' is not a delimiter"),
        (("registry: types/registry", ""), "line 10: give both a type and the registry"),
        (("key: customer", "keys: customer"), "line 6: there is no field 'keys' here; known are"),
        (("  files:", "  file:"), "line 5: there is no field 'file' here; known are kafka, files"),
        (("file:///data/orders/", "ftp://x/"), "line 5: "),
        (("file:///data/orders/", "${NOWHERE}"), "line 5: the environment has no variable NOWHERE"),
    ],
)
def test_errors_of_files_contain_the_line(change: tuple[str, str], problem: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        read_spec(FILES.replace(*change), {})
    assert problem in str(raised.value)


def test_one_source_is_needed() -> None:
    with pytest.raises(InvalidInput, match="the file is empty"):
        read_spec("", {})
    with pytest.raises(InvalidInput, match="line 1: give one source, of the kind kafka or files"):
        read_spec("{name: a, stream: b, source: {}}", {})


REGISTER = FILES.replace("type: shop.Order", "type: shop.Order\nregister: true")


def test_register_makes_the_ingest_register_its_schema() -> None:
    assert "register: true" in REGISTER
    assert read_spec(REGISTER, {}).registers
    assert not read_spec(FILES, {}).registers


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("register: true", "register: yes please"), "register is 'yes please'; it may be false, true"),
        (("type: shop.Order\n", ""), "give both a type and the registry that has it, or neither"),
        (("type: shop.Order\n", "type: shop.Order@2\n"), "the type is named without one: leave @ and it out"),
        (("format: csv", "format: json"), "files: files of JSON have no schema: leave `register` out"),
    ],
)
def test_invalid_uses_of_register_are_refused(change: tuple[str, str], problem: str) -> None:
    text = REGISTER.replace(*change)
    assert text != REGISTER
    with pytest.raises(InvalidInput, match=re.escape(problem)):
        read_spec(text, {})


def test_register_needs_a_type() -> None:
    text = "{name: a, stream: b, source: {files: {url: 'file:///x/', format: csv}}, register: true}"
    with pytest.raises(InvalidInput, match="`register` needs the name of a type and its registry"):
        read_spec(text, {})
    text = "{name: a, stream: b, source: {kafka: {brokers: b, topics: [t]}}, register: true, type: T, registry: r}"
    with pytest.raises(InvalidInput, match="kafka: values that are json have no schema"):
        read_spec(text, {})
