"""Outputs of tasks, published to journals exactly once despite retries."""
