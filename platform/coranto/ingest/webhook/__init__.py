"""Requests of webhooks: their options, signatures and bodies, and the keys that were seen."""
