"""The consumer runtime: shards, assigned to processes, that process each message exactly once."""
