"""A Dagster instance: its home in a cluster's data folder, its running runs with their heartbeats, and its log."""
