"""Brokers for tests: in this process, or in one of their own that can be killed."""
