"""The sensor of journals."""
