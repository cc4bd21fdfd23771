"""Committed reads: what many tasks decide together."""
