"""Committed reads: many tasks decide together which messages are committed."""
