"""Options of the source and the sink."""
