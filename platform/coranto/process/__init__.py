"""Helpers for processes: directory locks, memory settings, staged startup, and Java."""
