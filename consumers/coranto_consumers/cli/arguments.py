"""Shared arguments and options of consumer commands. It has few imports, so that commands start fast."""

from __future__ import annotations

from typing import Annotated

import typer

_STORE = typer.Option(
    "--store",
    envvar="CORANTO_STORE_URL",
    help="URL of the consumer's store in SQL, or iceberg://CATALOG/namespace.table. Process lists show options: "
    "use $CORANTO_STORE_URL for passwords.",
    show_default=False,
)
Store = Annotated[str, _STORE]
StoreOrNone = Annotated[str | None, _STORE]
ConsumerName = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="A Spark consumer's name, a shard's full name in the store, or module:App for all its shards.",
    ),
]
Consumer = Annotated[
    str | None,
    typer.Option(
        "--consumer",
        envvar="CORANTO_CONSUMER",
        help="Any process of the consumer, as host:port. Default: the one consumer of the cluster of `coranto up`.",
        show_default=False,
    ),
]
