"""Appends of clients: one by one, in batches, and over streams to brokers. Users import from `coranto.client`."""
