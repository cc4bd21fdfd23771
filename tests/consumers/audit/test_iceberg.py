"""Evidence from an Iceberg store, given by a URL: the data for audits, `consumer offsets` and operators."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog

from coranto.cli import main
from coranto.messages.checkpoints import Checkpoint, Source
from coranto_consumers.audit.evidence import Evidence
from coranto_consumers.audit.iceberg import IcebergEvidence
from coranto_consumers.stores.iceberg.changes import append
from coranto_consumers.stores.iceberg.owner import IcebergOwner
from coranto_consumers.stores.iceberg.urls import IcebergHome
from coranto_consumers.stores.iceberg.writing import FileWriter
from coranto_consumers.stores.reading import read_checkpoint
from tests.consumers.stores.iceberg.named_catalog import named_catalog

URL = "iceberg://lake/shop.one"
ROWS = pa.table({"n": pa.array([1, 2], pa.int64())})
CHECKPOINT = Checkpoint({"shop/b": Source(7), "shop/a": Source(12)})


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SqlCatalog:
    """The catalog `lake` of pyiceberg's settings, with a consumer's two tables."""
    catalog = named_catalog(tmp_path, monkeypatch)
    for name in ("shop.one", "shop.two"):
        catalog.create_table(name, ROWS.schema)
    return catalog


@pytest.fixture
def owner(catalog: SqlCatalog) -> IcebergOwner:
    owner = IcebergOwner(catalog, "shop.one")
    owner.raise_fence("revenue")
    return owner


def commit(owner: IcebergOwner, *names: str) -> None:
    changes = {}
    for name in names:
        owner.register_table(name)
        writer = FileWriter.of(owner.load(name), owner.name_of(owner.next_number))
        files = list(writer.write(ROWS.to_batches()))
        changes[name] = lambda transaction, summary, files=files, writer=writer: append(
            transaction, summary, files, writer
        )
    owner.commit(CHECKPOINT, changes, owner.next_number)


def evidence(*queries: str) -> Evidence:
    return IcebergEvidence(IcebergHome.at(URL)).read(["revenue", "other"], queries)


def test_offsets_are_printed(owner: IcebergOwner, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["consumer", "offsets", "revenue", "--store", URL]) == 1
    assert "consumer 'revenue' has no checkpoint in the store" in capsys.readouterr().err
    assert read_checkpoint(URL, "nobody") is None
    commit(owner, "shop.one")
    assert main(["consumer", "offsets", "revenue", "--store", URL]) == 0
    assert json.loads(capsys.readouterr().out) == {"shop/a": 12, "shop/b": 7}


def test_an_audit_sees_checkpoints_and_tables_of_one_commit(catalog: SqlCatalog, owner: IcebergOwner) -> None:
    commit(owner, "shop.one", "shop.two")
    catalog.create_table("shop.three", ROWS.schema)
    owner.register_table("shop.three")
    for name in ("shop.one", "shop.two", "shop.three"):  # After the commit: audits compare tables with the checkpoint.
        catalog.load_table(name).append(ROWS)
    found = evidence(
        "SELECT count(*) FROM Shop.ONE",
        "SELECT sum(n) FROM shop.two",
        "SELECT count(n) FROM shop.three",
        "SELECT 1, 2",
        "SELECT n FROM nothing",
    )
    assert found.rows.keys() == {"revenue"}
    assert (found.rows["revenue"].fence, found.rows["revenue"].checkpoint) == (1, CHECKPOINT)
    assert list(found.values[:3]) == [2, 3, 0]
    assert [str(each)[:30] for each in found.values[3:]] == [
        "it does not return exactly one",
        "CatalogException: Catalog Erro",
    ]
    assert IcebergEvidence(IcebergHome.at(URL)).names("rev") == ["revenue"]


def test_an_audit_names_the_damage(catalog: SqlCatalog, owner: IcebergOwner) -> None:
    first = owner.load().metadata.snapshots[0].snapshot_id
    commit(owner, "shop.one")
    table = owner.load()
    for task in table.scan().plan_files():
        Path(task.file.file_path.removeprefix("file://")).unlink()
    (gone,) = evidence("SELECT sum(n) FROM shop.one").values
    assert isinstance(gone, ValueError)
    assert "FileNotFoundError" in str(gone)
    table.manage_snapshots().set_current_snapshot(first).commit()
    row = evidence().rows["revenue"]
    assert row.fence == 1
    assert "shop.one was rolled back behind the checkpoint of revenue" in row.damage
