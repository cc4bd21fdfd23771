"""Requests of webhooks: options, signatures, bodies, and the window of deduplication keys."""
