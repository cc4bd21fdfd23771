"""Stores of consumers. Effects of messages commit there together with the offsets of these messages."""

from coranto.extras import explained

try:
    from coranto_consumers.stores.base import Store
    from coranto_consumers.stores.json_file import JsonFileStore
    from coranto_consumers.stores.merge import Add, Max, MergeRule, Min, Quotient, Replace
    from coranto_consumers.stores.sql import Restored, SqlStore, StoreTransaction
    from coranto_consumers.stores.sql_shard import SqlShardStore
    from coranto_consumers.stores.sqlite_file import SqliteStore
    from coranto_consumers.stores.urls import display_url, parse_store_url
except ModuleNotFoundError as error:
    raise explained(error) from error

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
