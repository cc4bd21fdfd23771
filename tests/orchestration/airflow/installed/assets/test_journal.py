"""Assets of journals, their URIs, and their names in OpenLineage."""

from __future__ import annotations

import pytest
from airflow.sdk import Asset

from airflow_coranto.assets.journal import journal_asset, journal_uri, to_openlineage
from coranto.errors import InvalidInput


def test_a_group_has_a_valid_airflow_uri() -> None:
    asset = journal_asset("flights/events", cluster="prod")
    assert asset.uri == "journal://prod/flights/events"
    assert not asset.watchers


def test_a_watched_asset_has_a_trigger_of_its_group() -> None:
    asset = journal_asset("flights/events", watch=True, coranto_conn_id="prod", earliest=True, name="events")
    (watcher,) = asset.watchers
    _, arguments = watcher.trigger.serialize()
    assert (arguments["group"], arguments["coranto_conn_id"], arguments["earliest"]) == ("flights/events", "prod", True)
    assert asset.name == "events"


@pytest.mark.parametrize("uri", ["journal://prod", "journal:///flights", "journal://u:p@prod/flights?x=1"])
def test_other_uris_are_refused(uri: str) -> None:
    with pytest.raises(ValueError, match="journal's URI"):
        Asset(uri)


def test_invalid_groups_and_options_are_refused() -> None:
    with pytest.raises(InvalidInput):
        journal_uri("flights/events/")
    with pytest.raises(InvalidInput):
        journal_uri("flights//events")
    with pytest.raises(InvalidInput, match="watch=True"):
        journal_asset("flights/events", interval=1.0)


def test_lineage_names_the_cluster_and_the_group() -> None:
    dataset = to_openlineage(journal_asset("flights/events", cluster="prod"), None)
    assert (dataset.namespace, dataset.name) == ("journal://prod", "flights/events")
