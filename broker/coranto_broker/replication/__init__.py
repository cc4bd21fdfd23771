"""Replication: the resolver, replicas, peers, the pipeline, and flow control."""
