"""Journals as a message queue."""
