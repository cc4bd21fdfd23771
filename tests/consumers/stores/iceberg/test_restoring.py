"""A lost checkpoint is restored so that no earlier owner can commit."""

from pathlib import Path

import pytest
from pyiceberg.catalog.sql import SqlCatalog

from coranto.errors import Fenced
from coranto_consumers.stores.contract import SHARD, checkpoint
from coranto_consumers.stores.iceberg.owner import IcebergOwner
from coranto_consumers.stores.iceberg.restoring import restore
from coranto_consumers.stores.iceberg.state import key_of, state_of
from tests.consumers.stores.iceberg.named_catalog import named_catalog
from tests.consumers.stores.iceberg.test_owner import ONE, ROWS, commit


def owner_of(catalog: SqlCatalog) -> IcebergOwner:
    return IcebergOwner(catalog, ONE)


def test_a_zombie_does_not_commit_after_its_checkpoint_was_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = named_catalog(tmp_path, monkeypatch)
    catalog.create_table(ONE, ROWS.schema)
    zombie = owner_of(catalog)
    for _ in range(2):
        zombie.raise_fence(SHARD)
    commit(zombie, 100, ONE)
    with catalog.load_table(ONE).transaction() as change:
        change.remove_properties(key_of(SHARD))
    assert restore(owner_of(catalog), SHARD, 2, checkpoint(100)) == 3
    found = state_of(catalog.load_table(ONE), SHARD)
    assert (found.fence, found.checkpoint) == (3, checkpoint(100))
    with pytest.raises(Fenced, match="fence 2 was raised by a later owner"):
        commit(zombie, 200, ONE)
    assert restore(owner_of(catalog), SHARD, 2, checkpoint(100)) == 4, "above the existing fence, too"
    following = owner_of(catalog)
    assert following.raise_fence(SHARD).checkpoint == checkpoint(100)
    commit(following, 200, ONE)
    assert catalog.load_table(ONE).scan().count() == 2 * ROWS.num_rows
