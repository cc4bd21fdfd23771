"""`coranto consumer offsets` prints a checkpoint; `accept-journals` lets a consumer resume in recreated journals."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from coranto.cli import main
from coranto.errors import Fenced
from coranto.messages.checkpoints import Checkpoint, Source
from coranto_consumers.stores.iceberg.owner import IcebergOwner
from coranto_consumers.stores.reading import read_checkpoint
from coranto_consumers.stores.sql import SqlStore
from tests.consumers.stores.iceberg.named_catalog import named_catalog


def test_the_offsets_of_a_checkpoint_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    store = SqlStore(url)
    assert main(["consumer", "offsets", "revenue", "--store", url]) == 1
    assert "consumer 'revenue' has no checkpoint in the store" in capsys.readouterr().err
    fence, _ = store.raise_fence("revenue")
    with store.transaction("revenue", fence) as transaction:
        transaction.commit(Checkpoint({"shop/b": Source(7), "shop/a": Source(12, {}, "c0-1")}))
    assert main(["consumer", "offsets", "revenue", "--store", url]) == 0
    assert json.loads(capsys.readouterr().out) == {"shop/a": {"offset": 12, "journal_id": "c0-1"}, "shop/b": 7}


def test_accepting_journals_removes_only_their_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    store = SqlStore(url)
    command = ["consumer", "accept-journals", "revenue", "shop/a", "--store", url]
    assert main(command) == 1
    assert "shop/a is not a source in the checkpoint of consumer 'revenue'" in capsys.readouterr().err
    fence, _ = store.raise_fence("revenue")
    before = Checkpoint({"shop/a": Source(12, {}, "c0-1"), "shop/b": Source(7, {}, "c0-2")}, {"out": b"ack"})
    with store.transaction("revenue", fence) as transaction:
        transaction.commit(before)
    assert main(command) == 0
    assert "shop/a: consumer revenue continues at 12" in capsys.readouterr().out
    found = store.read("revenue")
    assert found is not None
    assert found.checkpoint == before
    assert {name: source.journal_id for name, source in found.checkpoint.sources.items()} == {
        "shop/a": "",
        "shop/b": "c0-2",
    }
    with pytest.raises(Fenced), store.transaction("revenue", fence) as transaction:
        transaction.commit(before)


def test_journals_of_a_consumer_with_an_iceberg_store_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    catalog = named_catalog(tmp_path, monkeypatch)
    owner = IcebergOwner(catalog, "shop.orders")
    catalog.create_namespace_if_not_exists("shop")
    catalog.create_table("shop.orders", pa.schema([("cents", pa.int64())]))
    owner.raise_fence("revenue")
    before = Checkpoint({"shop/a": Source(12, {}, "c0-1"), "shop/b": Source(7, {}, "c0-2")}, {"out": b"ack"})
    owner.commit(before, {}, owner.state.committed)
    url = "iceberg://lake/shop.orders"
    command = ["consumer", "accept-journals", "revenue"]
    assert main([*command, "shop/c", "--store", url]) == 1
    assert "shop/c is not a source in the checkpoint" in capsys.readouterr().err
    assert main([*command, "shop/a", "--store", url]) == 0
    assert "shop/a: consumer revenue continues at 12" in capsys.readouterr().out
    found = read_checkpoint(url, "revenue")
    assert found is not None
    assert (found.checkpoint, found.fence) == (before, 2)
    ids = {name: source.journal_id for name, source in found.checkpoint.sources.items()}
    assert ids == {"shop/a": "", "shop/b": "c0-2"}
    with pytest.raises(Fenced):
        owner.commit(before, {}, owner.state.committed)
