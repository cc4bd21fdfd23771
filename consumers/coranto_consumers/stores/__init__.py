"""Stores of consumers: where the effects of messages and the offsets they came from commit together."""

from coranto_consumers.stores.merge import Add, Max, MergeRule, Min, Quotient, Replace
from coranto_consumers.stores.sql import Restored, SqlStore, StoreTransaction
from coranto_consumers.stores.urls import display_url, parse_store_url

__all__ = [
    "Add",
    "Max",
    "MergeRule",
    "Min",
    "Quotient",
    "Replace",
    "Restored",
    "SqlStore",
    "StoreTransaction",
    "display_url",
    "parse_store_url",
]
