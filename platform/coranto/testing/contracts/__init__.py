"""Contracts as tests: for your own fragment stores and coordinators. Consumers' stores have theirs in their package."""
