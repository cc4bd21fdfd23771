"""Real consumers over real brokers in a simulated world: faults on both, healing, and a check of I8 to I10.

It lives among the tests because neither brokers nor consumers may know the others. In the repository's root,
`python -m tests.simulation.consumers --help` runs any number of seeds; see `docs/simulation.md`.
"""
