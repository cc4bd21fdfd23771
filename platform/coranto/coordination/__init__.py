"""Coordination: the key space that a cluster's processes share through etcd.

=================  ====================================================================================
`etcd`             `Coordinator`, the small interface to etcd, and the real one behind it
`layout`           where items, members and assignments live, and how keys are spelled
`entities`         what the values mean: journals and brokers
`keyspace`         a local mirror of the prefix: pure merge, immutable states, waiting for revisions
`lease`            a process's liveness: its lease, resumed after a crash, and its member key
`planning`         which member shall hold which item, and what to change now, pure
`capacity`         of planning: what members may hold, and their fair shares
`placement`        of planning: where items belong in the end; `flow_network` finds the best for it
`convergence`      of planning: the safe steps towards it; `plan_values` are what all of these speak of
`allocator`        the loop in which the leader plans and applies
=================  ====================================================================================
"""
