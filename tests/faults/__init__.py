"""Fault injection on a cluster of real processes, and the checks of it afterwards.

* `links`: TCP proxies between brokers, and between brokers and etcd, that cut, hold up or delay traffic.
* `cluster`: etcd and brokers in zones, each of which can be killed, paused, stopped and started.
* `workload`: writers and readers that run all the time, and record their calls and observations.
* `verdict`: proof of life after healing, and the check of history, replicas and stores.
* `nemesis`: the faults, one by one; `python -m tests.faults` runs randomly chosen ones for minutes.

It requires Linux, whose unix sockets tell the process at the other end.
"""
