"""Sensors that report the work of programs outside Dagster: of writers to journals, and of consumers."""
