"""Reader groups, and state that processes share."""
