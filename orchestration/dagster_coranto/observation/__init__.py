"""Sensors that report the work of writers and consumers outside Dagster."""
