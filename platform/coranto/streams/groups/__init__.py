"""Reader groups, and replicated state for processes."""
