from __future__ import annotations

import dagster as dg
import pytest
from pydantic import ValidationError

from dagster_coranto.translation.metadata import ConsumerMetadataSet, GroupMetadataSet
from dagster_coranto.translation.metadata_set import TableMetadata


def test_metadata_has_its_namespace_and_omits_none() -> None:
    found = GroupMetadataSet(messages=0, heads=dg.MetadataValue.json({"a": 1}))
    wanted = {"dagster-coranto/messages": 0, "dagster-coranto/heads": dg.MetadataValue.json({"a": 1})}
    assert dict(found) == {**found} == wanted
    assert dict(TableMetadata(row_count=3)) == {"dagster/row_count": 3}


def test_a_set_is_extracted_from_metadata_returned_by_dagster() -> None:
    """Dagster wraps plain values."""
    heads = dg.MetadataValue.json({"a": 1})
    given = {
        "dagster-coranto/lag_bytes": dg.MetadataValue.int(7),
        "dagster-coranto/offsets_read": heads,
        "dagster-coranto/else": dg.MetadataValue.int(1),
        "other/messages": dg.MetadataValue.int(2),
    }
    assert ConsumerMetadataSet.extract(given) == ConsumerMetadataSet(lag_bytes=7, offsets_read=heads)
    assert TableMetadata.extract({"dagster/table_name": dg.MetadataValue.text("a.b")}).table_name == "a.b"
    assert TableMetadata.extract({"dagster/table_name": "a.b"}).table_name == "a.b"


def test_unknown_names_and_wrong_types_are_refused() -> None:
    with pytest.raises(ValidationError):
        GroupMetadataSet(mesages=1)  # type: ignore[call-arg]
    with pytest.raises(ValidationError):
        GroupMetadataSet(messages="many")  # type: ignore[arg-type]
