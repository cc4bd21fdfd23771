"""Checks of journal specs that are applied, against the journals that exist."""
