"""Streams on the broker simulation: real brokers, writers and readers of `coranto.streams`, and faults of every kind.

`python -m tests.simulation.streams --seed N` runs one seed and tells everything that happens.
"""
