"""Files that describe assets, and the look-up of definitions by asset."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest

from coranto.errors import InvalidInput
from dagster_coranto.translation.documents import Definitions, read_document


def _refuse(text: str) -> str:
    raise InvalidInput(f"line 1: {text!r} is not a name")


def test_errors_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "orders.yaml"
    with pytest.raises(InvalidInput, match=r"table: there is no file .*orders\.yaml: write it, or correct the path"):
        read_document(file, str.strip, "table")
    file.write_bytes(b"\xff")
    with pytest.raises(InvalidInput, match=r"table: .*orders\.yaml is not UTF-8"):
        read_document(file, str.strip, "table")
    file.write_text(" orders ")
    with pytest.raises(InvalidInput, match=r"table: .*orders\.yaml: line 1: ' orders ' is not a name"):
        read_document(file, _refuse, "table")
    assert read_document(file, str.strip, "table") == "orders"


def test_a_definition_is_found_only_by_its_asset() -> None:
    @dg.asset
    def one() -> None: ...

    @dg.asset
    def other() -> None: ...

    definitions = Definitions[str]("build_one")
    assert definitions.add(one, "the first") is one
    assert definitions.of(one.with_attributes(group_names_by_key={one.key: "shop"})) == "the first"
    with pytest.raises(InvalidInput, match=r"AssetKey\(\['other'\]\) is not an asset of build_one"):
        definitions.of(other)
