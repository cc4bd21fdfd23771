"""Replication: from a journal to its brokers, replicas, peers, and the pipeline with those that wait for it."""
