"""Replication: the resolver, replicas, peers, the pipeline, and the appends that wait for the pipeline."""
