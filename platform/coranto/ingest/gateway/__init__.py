"""The gateway of webhooks: an ingest whose rows come as HTTP requests."""
