"""Stores of consumers: the effects of messages commit together with the messages' offsets.

Names are imported on first use, so that a command that reads a checkpoint does not import recovery logs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coranto.extras import require
from coranto.lazy import lazy_names

require("consumers", "sqlalchemy")

if TYPE_CHECKING:
    from coranto_consumers.stores.base import Store
    from coranto_consumers.stores.fencing import Restored
    from coranto_consumers.stores.json_file import JsonFileStore
    from coranto_consumers.stores.merge import Add, Max, MergeRule, Min, Quotient, Replace
    from coranto_consumers.stores.sql import SqlStore, StoreTransaction
    from coranto_consumers.stores.sql_shard import SqlShardStore
    from coranto_consumers.stores.sqlite_file import SqliteStore
    from coranto_consumers.stores.urls import display_url, parse_store_url

_MODULES = {
    "Store": "base",
    "JsonFileStore": "json_file",
    **dict.fromkeys(("Add", "Max", "MergeRule", "Min", "Quotient", "Replace"), "merge"),
    "Restored": "fencing",
    **dict.fromkeys(("SqlStore", "StoreTransaction"), "sql"),
    "SqlShardStore": "sql_shard",
    "SqliteStore": "sqlite_file",
    **dict.fromkeys(("display_url", "parse_store_url"), "urls"),
}

__all__ = [
    "Add",
    "JsonFileStore",
    "Max",
    "MergeRule",
    "Min",
    "Quotient",
    "Replace",
    "Restored",
    "SqlShardStore",
    "SqlStore",
    "SqliteStore",
    "Store",
    "StoreTransaction",
    "display_url",
    "parse_store_url",
]

__getattr__ = lazy_names(__name__, {name: f"{__name__}.{module}" for name, module in _MODULES.items()})
