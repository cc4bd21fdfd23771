"""Helpers of long-lived processes: locks on their data directories, and memory settings."""
