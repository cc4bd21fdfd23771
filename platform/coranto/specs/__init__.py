"""Specs and messages: what is valid, and specs as YAML."""
