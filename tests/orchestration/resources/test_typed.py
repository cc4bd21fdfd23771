from __future__ import annotations

from functools import partial
from typing import Any

import dagster as dg
import pytest

from dagster_coranto import JournalIOManager, JournalResource
from dagster_coranto.resources.typed import resource_parameters


class Shop(dg.ConfigurableResource[Any]):
    """A user's own resource."""


def publish(
    context: dg.AssetExecutionContext,
    number: int,
    shop: Shop,
    journals: JournalResource,
    manager: JournalIOManager,
    plain: dg.ResourceParam[str],
) -> Shop: ...


class Publisher:
    """A callable object."""

    def __call__(self, context: dg.AssetExecutionContext, shop: Shop) -> None: ...

    def method(self, context: dg.AssetExecutionContext, shop: Shop) -> None: ...


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (publish, {"shop", "journals", "manager", "plain"}),
        (partial(publish, number=1), {"shop", "journals", "manager", "plain"}),
        (Publisher(), {"shop"}),
        (Publisher().method, {"shop"}),
        (lambda context: None, set()),
    ],
)
def test_resource_parameters_are_found_by_their_classes(function: Any, wanted: set[str]) -> None:
    assert resource_parameters(function) == wanted
