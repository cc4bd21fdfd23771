"""Reconcilers of trees of journal specs, as orchestrators use them."""

from __future__ import annotations

import pytest

from coranto.client import JournalClient
from coranto.client.groups import JournalGroup
from coranto.errors import InvalidInput
from coranto.reconcile.trees import tree_reconciler
from coranto.testing.fake_broker import FakeBroker

TREE = """
name: shop/
replication: 1
fragment: {length: 4194304, compression_codec: NONE, refresh_interval: 30s}
children: [{name: shop/orders}]
"""


async def test_unnamed_journals_of_the_groups_are_deleted_only_below_the_prefix() -> None:
    async with FakeBroker() as broker, JournalClient(broker.endpoint) as client:
        for name in ("rerun/shop/left", "shop/left", "rerun/other/left"):
            broker.create(name)
        plan = await tree_reconciler(client, TREE, prefix="rerun/", prune=[JournalGroup("shop")]).plan()
        assert [(step.action.value, step.name) for step in plan.due] == [
            ("create", "rerun/shop/orders"),
            ("delete", "rerun/shop/left"),
        ]
        plan = await tree_reconciler(client, TREE).plan()
        assert [(step.action.value, step.name) for step in plan.due] == [("create", "shop/orders")]


async def test_text_that_is_not_a_tree_is_refused() -> None:
    with pytest.raises(InvalidInput):
        tree_reconciler(JournalClient("127.0.0.1:1"), "name: [")
