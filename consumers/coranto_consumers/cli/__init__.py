"""`coranto consumer …` and `coranto shards …`."""
