"""Real brokers in a simulated world: workload, faults, healing, and a check of everything observed.

`python -m tests.simulation.broker --help` runs any number of seeds; see `docs/simulation.md`.
"""
