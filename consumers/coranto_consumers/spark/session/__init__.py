"""Spark sessions, their workers, and errors of their tasks."""
