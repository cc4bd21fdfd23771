"""Committed reads: many tasks jointly decide which messages are committed."""
