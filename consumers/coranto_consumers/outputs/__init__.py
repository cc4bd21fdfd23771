"""Outputs of tasks, published to journals once, however often a task is tried."""
