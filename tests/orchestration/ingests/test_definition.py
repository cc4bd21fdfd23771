"""The definition of an ingest: the names in its file, and its progress."""

from __future__ import annotations

from pathlib import Path

import pytest

from coranto.errors import InvalidInput, StreamNotFound
from dagster_coranto import build_ingest_asset
from dagster_coranto.ingests.assets import INGESTS
from dagster_coranto.ingests.definition import IngestDefinition
from tests.orchestration.ingests.conftest import Place

pytestmark = pytest.mark.integration


def test_invalid_files_are_reported_when_definitions_load(place: Place, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"there is no file .*missing\.yaml: write it, or correct the path"):
        build_ingest_asset(tmp_path / "missing.yaml")
    place.file.write_text("name: orders\n")
    with pytest.raises(InvalidInput, match=r"orders\.yaml: line 1: the field 'stream' is missing"):
        build_ingest_asset(place.file)


def test_names_can_be_read_without_the_variables_of_other_fields(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text('{name: a, stream: b/c, source: {kafka: {brokers: "${NOT_SET}", topics: [t]}}}')
    assert IngestDefinition.names_of(file) == ("a", "b/c", "kafka")
    file.write_text("{name: a, stream: b, source: {pigeon: {}}}")
    with pytest.raises(InvalidInput, match="there is no field 'pigeon' here; known are kafka, files"):
        IngestDefinition.names_of(file)
    file.write_bytes(b"\xff")
    with pytest.raises(InvalidInput, match=r"a\.yaml is not UTF-8"):
        IngestDefinition.names_of(file)
    file.write_text("")
    with pytest.raises(InvalidInput, match="the file is empty"):
        IngestDefinition.names_of(file)


def test_the_state_has_progress_lag_and_a_digest(place: Place) -> None:
    definition = INGESTS.of(build_ingest_asset(place.file))
    place.put("a", {"n": 1})
    state = definition.state(place.journals)
    assert (state.progress.rows, state.lag) == (0, 9)
    before = state.digest
    place.put("b", {"n": 1})
    assert definition.state(place.journals).digest != before
    text = place.file.read_text()
    place.file.write_text(text[: text.index(', "create"')] + "}")
    with pytest.raises(StreamNotFound):
        definition.state(place.journals)
