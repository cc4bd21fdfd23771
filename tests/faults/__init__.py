"""Fault injection on a cluster of real processes, and the checks of it afterwards.

* `links`: TCP proxies between brokers, and between brokers and etcd, that cut, hold or delay traffic.
* `cluster`: etcd and brokers in zones. Each broker can be killed, paused, stopped and started.
* `workload`: writers and readers that run all the time, and record their calls and observations.
* `verdict`: liveness checks after all faults, and the check of history, replicas and stores.
* `nemesis`: the faults, one by one; `python -m tests.faults` runs randomly chosen ones for minutes.

It requires Linux, whose unix sockets identify the process at the other end.
"""
