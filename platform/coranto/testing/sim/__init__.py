"""A deterministic simulation kit: a seeded event loop in virtual time, and twins of every effect.

* `loop`: the event loop, and `Process`es that can be killed and paused.
* `disk`, `etcd`, `network`, `rpc`, `object_store`, `clocks`: twins of the outside world, with its faults.

It depends only on the wire protocol of brokers. `coranto.testing.Cluster` runs real brokers in it.
"""
