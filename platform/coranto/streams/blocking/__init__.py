"""Streams for code that blocks."""
