"""Dagster's tags on runs and materialisations, as its documentation names them.

They include the versions of an asset's inputs. Dagster compares them with the inputs' current versions, and shows the
asset as "Unsynced" if they differ. By default, Dagster uses the versions in its database at the start of a step. A
consumer reads the journals themselves, so it sets more accurate versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import dagster as dg

PARENT_RUN: Final = "dagster/parent_run_id"
PARTITION: Final = "dagster/partition"
RESUMES: Final = "dagster/is_resume_retry"
RUN_KEY: Final = "dagster/run_key"
SENSOR: Final = "dagster/sensor_name"
VERSION_TAG: Final = "dagster/data_version"
_INPUT_TAG: Final = "dagster/input_data_version/"
_POINTER_TAG: Final = "dagster/input_event_pointer/"
_CODE_TAG: Final = "dagster/code_version"
_NEVER_REPORTED: Final = "INITIAL"
"""Dagster's version of an asset that was never reported."""


def last_tags(instance: dg.DagsterInstance, key: dg.AssetKey) -> Mapping[str, str]:
    """Return the tags of an asset's last materialisation, with its version and its inputs' versions."""
    event = instance.get_latest_materialization_event(key)
    made = event.asset_materialization if event is not None else None
    return (made.tags or {}) if made is not None else {}


def last_versions(instance: dg.DagsterInstance, keys: Iterable[dg.AssetKey]) -> dict[dg.AssetKey, str]:
    """Return the data versions of assets' last materialisations."""
    return {key: last_tags(instance, key).get(VERSION_TAG, _NEVER_REPORTED) for key in keys}


def event_tags(version: str, inputs: Mapping[dg.AssetKey, str], code_version: str | None = None) -> dict[str, str]:
    """Return the tags of a materialisation. `inputs` has the version of each input of the asset."""
    versions = {f"{_INPUT_TAG}{key.to_user_string()}": at for key, at in inputs.items()}
    pointers = {f"{_POINTER_TAG}{key.to_user_string()}": "NULL" for key in inputs}
    return {VERSION_TAG: version, _CODE_TAG: code_version or "", **versions, **pointers}


def result_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the tags of a step's result that replace Dagster's own."""
    return {name: value for name, value in tags.items() if name.startswith(_INPUT_TAG)}


def growth_tags(version: str, last: Mapping[str, str]) -> dict[str, str]:
    """Return the tags of a materialisation that reports growth, with the inputs of the last one (`last_tags`)."""
    kept = (_INPUT_TAG, _POINTER_TAG, _CODE_TAG)
    return {**{name: value for name, value in last.items() if name.startswith(kept)}, VERSION_TAG: version}
