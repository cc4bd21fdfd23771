"""`coranto consumer offsets` prints a checkpoint as a file of offsets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coranto.cli import main
from coranto.messages.checkpoints import Checkpoint, Source
from coranto_consumers.stores.sql import SqlStore


def test_the_offsets_of_a_checkpoint_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    store = SqlStore(url)
    assert main(["consumer", "offsets", "revenue", "--store", url]) == 1
    assert "consumer 'revenue' has no checkpoint in the store" in capsys.readouterr().err
    fence, _ = store.raise_fence("revenue")
    with store.transaction("revenue", fence) as transaction:
        transaction.commit(Checkpoint({"shop/b": Source(7), "shop/a": Source(12)}))
    assert main(["consumer", "offsets", "revenue", "--store", url]) == 0
    assert json.loads(capsys.readouterr().out) == {"shop/a": 12, "shop/b": 7}
