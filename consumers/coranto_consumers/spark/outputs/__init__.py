"""Outputs of applications, and the stores that they are written to."""
