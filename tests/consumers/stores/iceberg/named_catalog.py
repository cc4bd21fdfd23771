"""A catalog in pyiceberg's settings, for stores given by URL."""

from __future__ import annotations

from pathlib import Path

import pyiceberg.catalog
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.utils.config import Config


def named_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SqlCatalog:
    """Return the new catalog `lake`, with the namespace `shop`."""
    uri, warehouse = f"sqlite:///{tmp_path}/catalog.db", f"file://{tmp_path}"
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__URI", uri)
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__WAREHOUSE", warehouse)
    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())  # Processes read their settings once.
    catalog = SqlCatalog("lake", uri=uri, warehouse=warehouse)
    catalog.create_namespace("shop")
    return catalog
