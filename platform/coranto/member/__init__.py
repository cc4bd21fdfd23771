"""A process that is a member of a cluster, the same for brokers and consumers.

=================  ====================================================================================
`membership`       a member's life cycle from its lease to its graceful exit, in four phases
`process`          `MemberProcess`: a member with its own etcd connection, ports and signals
`settings`         the settings that all members share
`configuration`    where settings come from: command line, environment, configuration file, default
`command_line`     commands whose options are settings
`health`           /metrics, /ready and /live
`site`, `hosts`    one HTTP port, and its protection against DNS rebinding
=================  ====================================================================================
"""
