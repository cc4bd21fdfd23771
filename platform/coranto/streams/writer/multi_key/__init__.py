"""multi_key."""
