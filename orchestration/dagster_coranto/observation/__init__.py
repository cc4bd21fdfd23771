"""Sensors that report what programs outside Dagster do: to journals, and as consumers."""
