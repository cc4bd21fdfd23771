"""A cluster of real processes that faults happen to, and what is checked of it afterwards.

* `links`: TCP proxies between brokers, and between brokers and etcd, that cut, hold up or delay what passes.
* `cluster`: etcd and brokers in zones, each of which can be killed, paused, stopped and started.
* `workload`: writers and readers that run all the while, and write down what they did and saw.
* `verdict`: proof of life after healing, and the check of history, replicas and stores.
* `nemesis`: the faults, one by one; `python -m coranto.testing.faults` lets chance choose among them for minutes.

It is for Linux, whose unix sockets tell which process dials.
"""
