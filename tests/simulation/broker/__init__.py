"""Real brokers in a simulated world: workload, faults, recovery from them, and a check of all observations.

`python -m tests.simulation.broker --help` runs any number of seeds; see `docs/simulation.md`.
"""
