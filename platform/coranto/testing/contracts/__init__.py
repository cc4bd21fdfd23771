"""Contracts as tests: for fragment stores and coordinators of your own. Consumers' stores have theirs beside them."""
