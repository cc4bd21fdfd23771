"""Tables of PostgreSQL as a source: their rows, and then their changes. Needs the extra `postgres`."""
