"""Real brokers in a simulated world: workload, faults, healing, and a check of everything observed.

`python -m coranto_broker.simulation --help` runs any number of seeds; see `docs/simulation.md`.
"""
