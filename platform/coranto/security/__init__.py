"""Tokens and their scopes, admission of calls, and TLS of servers."""
