"""The gateway of webhooks: an ingest whose rows arrive as HTTP requests."""
