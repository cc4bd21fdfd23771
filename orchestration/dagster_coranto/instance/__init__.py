"""A Dagster instance: its home beside a cluster's data, its runs under way with their signs of life, and its log."""
