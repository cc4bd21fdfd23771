"""fragments."""
