"""Doctors for the engine of `coranto.recovery`: for failed shards, and for stores that contradict their journals."""

from coranto_consumers.recovery.repairable import RepairableDatabase, repairable_store
from coranto_consumers.recovery.shards import ShardDoctor
from coranto_consumers.recovery.stores import StoreDoctor

__all__ = ["RepairableDatabase", "ShardDoctor", "StoreDoctor", "repairable_store"]
