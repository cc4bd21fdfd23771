"""A deterministic simulation kit: a seeded event loop in virtual time, and twins of every effect.

* `loop`: the event loop, and `Process`es that can be killed and paused.
* `disk`, `etcd`, `network`, `rpc`, `object_store`, `clocks`: twins of the outside world, with its faults.
* `history`, `checker`, `linearizability`: what clients saw, and whether a correct journal could have shown it.

It knows nothing of brokers but their wire protocol; `coranto_broker.simulation` puts real brokers into it.
"""
