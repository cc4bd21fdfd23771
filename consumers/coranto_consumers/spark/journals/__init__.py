"""Ranges of journals: discovery, planning, fetching and reading."""
