"""Coordination: the key space that a cluster's processes share through etcd.

=================  ====================================================================================
`etcd`             `Coordinator`, the small interface to etcd, and its implementation on a real etcd
`layout`           the keys of items, members and assignments, and their encoding
`entities`         the decoded values: journals and brokers
`keyspace`         a local mirror of the prefix: pure merge, immutable states, waiting for revisions
`lease`            a process's liveness: its lease, resumed after a crash, and its member key
`planning`         the planner: which member holds which item, and which changes to make now, pure
`capacity`         part of planning: members' effective limits and fair shares
`placement`        part of planning: the final place of each item; `flow_network` finds the best one
`convergence`      part of planning: the safe steps towards the placement; `plan_values` holds the value types
`allocator`        the leader's loop, which plans and applies changes
=================  ====================================================================================
"""
