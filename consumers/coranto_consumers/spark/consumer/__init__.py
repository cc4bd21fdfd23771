"""Consumers: a transaction from its plan to its acknowledgement, and the lifecycle around it."""
