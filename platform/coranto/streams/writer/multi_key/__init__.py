"""Transactions on several routing keys."""
