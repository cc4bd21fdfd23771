"""A Dagster instance: its home folder, its runs under way with their heartbeats, and its log."""
