"""Streams on the broker simulation: real brokers, writers and readers of `coranto.streams`, and all kinds of faults.

`python -m tests.simulation.streams --seed N` runs one seed and prints every event.
"""
