"""Three consumers in a chain, over real brokers, with their processes and the brokers' killed all the time.

::

    publishers ──> raw ──clean──> clean ──aggregate──> totals ──alert──> alerts ──> a read-committed reader
                           │                 │                    │
              JSON file, recovery log    SQL store    SQLite, recovery log

`python -m coranto_consumers.testing_chain --seed 7 --minutes 5` runs it. Numbers are published in streams whose sums
are known. In the end every store must hold the exact sums, and every journal each message once and in order: sums go
wrong when a message is lost, counted twice, or taken from a transaction that was rolled back.

`model` says what is published and what must come of it, `applications` are the three consumers, `publishing` makes the
streams, `processes` and `chain` start everything, `nemesis` does the harm and `verdict` judges.
"""
