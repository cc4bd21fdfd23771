"""The validation of specs and messages, and specs as YAML."""
