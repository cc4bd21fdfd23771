"""Coordination: the key space that a cluster's processes share through etcd.

=================  ====================================================================================
`etcd`             `Coordinator`, the small interface to etcd, and the real one behind it
`layout`           where items, members and assignments live, and how keys are spelled
`entities`         what the values mean: journals and brokers
`keyspace`         a local mirror of the prefix: pure merge, immutable states, waiting for revisions
`lease`            a process's liveness: its lease, resumed after a crash, and its member key
`placement`        which member holds which item in the end, pure
`planning`         the safe steps towards it, pure
`allocator`        the loop in which the leader plans and applies
=================  ====================================================================================
"""
