"""Streams for blocking code."""
