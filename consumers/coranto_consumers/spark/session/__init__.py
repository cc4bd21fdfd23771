"""Spark sessions, their workers, and the clients, tokens and errors of their tasks."""
