"""Real consumers and brokers in a simulated world: faults of both, recovery from them, and a check of I8 to I10.

It is in `tests` because neither brokers nor consumers may import the other. In the repository's root,
`python -m tests.simulation.consumers --help` runs any number of seeds; see `docs/simulation.md`.
"""
