"""The trigger of journals."""
