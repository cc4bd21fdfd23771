"""Reader groups, and values that processes share."""
