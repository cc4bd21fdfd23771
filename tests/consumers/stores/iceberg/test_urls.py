"""URLs of homes in catalogs of pyiceberg's settings."""

from pathlib import Path

import pyarrow as pa
import pytest

from coranto.errors import InvalidInput
from coranto_consumers.spark.outputs.iceberg import IcebergStore
from coranto_consumers.stores.iceberg.urls import IcebergHome
from coranto_consumers.stores.reading import read_checkpoint
from tests.consumers.stores.iceberg.named_catalog import named_catalog

URL = "iceberg://lake/shop.one"


def test_urls_without_a_home_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = named_catalog(tmp_path, monkeypatch)
    catalog.create_table("shop.one", pa.schema([("n", pa.int64())]))
    assert IcebergStore.at(URL).name == "iceberg lake/shop.one"
    for url in ("iceberg://lake", "iceberg://lake/one", "iceberg:///shop.one", "iceberg://lake/shop/one.two"):
        with pytest.raises(InvalidInput, match=r"is not like iceberg://CATALOG/namespace\.table"):
            IcebergHome.at(url)
    with pytest.raises(InvalidInput, match=r"settings have no catalog 'sea'.*set PYICEBERG_CATALOG__SEA__URI"):
        IcebergHome.at("iceberg://sea/shop.one")
    with pytest.raises(InvalidInput, match=r"there is no table shop\.three"):
        read_checkpoint("iceberg://lake/shop.three", "revenue")
