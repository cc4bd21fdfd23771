"""Metadata that the library wrote, without its namespace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg

from dagster_coranto.translation.metadata_set import NAMESPACE


def without_namespace(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by name. Every name must be of the library's namespace."""
    assert all(name.startswith(f"{NAMESPACE}/") for name in metadata), metadata
    return {
        name.removeprefix(f"{NAMESPACE}/"): value.value if isinstance(value, dg.MetadataValue) else value
        for name, value in metadata.items()
    }
