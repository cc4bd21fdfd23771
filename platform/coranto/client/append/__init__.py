"""Appends of clients: single, batched, and over streams to brokers. Import public names from `coranto.client`."""
