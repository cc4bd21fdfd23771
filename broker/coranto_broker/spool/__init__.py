"""Spools: the state machine, its files and commit log, recovery, and the rules of the in-sync record."""
