"""Tables of PostgreSQL as a source: first their rows, then their changes. Needs the extra `postgres`."""
