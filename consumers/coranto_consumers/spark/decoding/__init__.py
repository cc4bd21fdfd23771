"""Decoding of messages into typed columns."""
