"""Checks of the journal specs of an Apply against the existing journals."""
