"""The input of one transaction."""
