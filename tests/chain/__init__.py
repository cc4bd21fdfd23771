"""Three consumers in a chain over real brokers, while consumer processes and brokers are killed.

::

    publishers ──> raw ──clean──> clean ──aggregate──> totals ──alert──> alerts ──> a read-committed reader
                           │                 │                    │
              JSON file, recovery log    SQL store    SQLite, recovery log

`python -m tests.chain --seed 7 --minutes 5` runs it. Numbers are published in streams whose sums
are known. At the end every store must hold the exact sums, and every journal must hold each message once and in order.
Sums are wrong when a message is lost, counted twice, or taken from a rolled-back transaction.

`model` has the journals and the expected results, `applications` has the three consumers, `publishing` publishes the
streams, `chain` starts all processes, `nemesis` injects faults, and `verdict` checks the result.
"""
