"""Doctors of consumers, for the engine of `coranto.recovery`: failed shards, and stores that journals contradict."""

from coranto_consumers.recovery.repairable import RepairableDatabase, repairable_store
from coranto_consumers.recovery.shards import ShardDoctor
from coranto_consumers.recovery.stores import StoreDoctor

__all__ = ["RepairableDatabase", "ShardDoctor", "StoreDoctor", "repairable_store"]
