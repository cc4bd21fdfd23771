"""URLs name homes in catalogs of pyiceberg's settings."""

from pathlib import Path

import pyarrow as pa
import pyiceberg.catalog
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.utils.config import Config

from coranto.errors import InvalidInput
from coranto_consumers.spark.iceberg import IcebergStore
from coranto_consumers.stores.iceberg.urls import IcebergHome
from coranto_consumers.stores.reading import read_checkpoint

URL = "iceberg://lake/shop.one"


def test_urls_that_name_no_home_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri, warehouse = f"sqlite:///{tmp_path}/catalog.db", f"file://{tmp_path}"
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__URI", uri)
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__WAREHOUSE", warehouse)
    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())  # Processes read their settings once.
    catalog = SqlCatalog("lake", uri=uri, warehouse=warehouse)
    catalog.create_namespace("shop")
    catalog.create_table("shop.one", pa.schema([("n", pa.int64())]))
    assert IcebergStore.at(URL).name == "iceberg lake/shop.one"
    for url in ("iceberg://lake", "iceberg://lake/one", "iceberg:///shop.one", "iceberg://lake/shop/one.two"):
        with pytest.raises(InvalidInput, match=r"is not like iceberg://CATALOG/namespace\.table"):
            IcebergHome.at(url)
    with pytest.raises(InvalidInput, match=r"settings have no catalog 'sea'.*set PYICEBERG_CATALOG__SEA__URI"):
        IcebergHome.at("iceberg://sea/shop.one")
    with pytest.raises(InvalidInput, match=r"there is no table shop\.three"):
        read_checkpoint("iceberg://lake/shop.three", "revenue")
