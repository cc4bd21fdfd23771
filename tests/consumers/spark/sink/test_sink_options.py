"""Options of the sink: the default ledger."""

from __future__ import annotations

import pytest

from coranto.errors import InvalidInput
from coranto_consumers.spark.sink.sink_options import SinkOptions

ENDPOINT = {"endpoint": "127.0.0.1:1"}


@pytest.mark.parametrize(
    ("options", "ledger"),
    [
        ({"journal": "shop/orders/0"}, "ledgers/shop/orders/0"),
        ({"prefix": "shop/orders/"}, "ledgers/shop/orders"),
        ({"prefix": "shop/orders/", "ledger": "other/ledger"}, "other/ledger"),
        ({"stream": "shop/orders"}, ""),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_the_ledger_is_derived_from_one_journal_or_folder(
    options: dict[str, str], ledger: str, streaming: bool
) -> None:
    assert SinkOptions.parse({**ENDPOINT, **options}, streaming=streaming).ledger == ledger


@pytest.mark.parametrize("option", ["subscribe", "selector"])
def test_other_targets_need_a_ledger(option: str) -> None:
    with pytest.raises(InvalidInput, match=r"option ledger: is required: .* Default: the name that journal or prefix"):
        SinkOptions.parse({**ENDPOINT, option: "shop/orders"}, streaming=False)
