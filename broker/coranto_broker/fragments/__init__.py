"""A broker's fragments: the index, the cache, the persister and its backlog, retention, and probes of stores."""
