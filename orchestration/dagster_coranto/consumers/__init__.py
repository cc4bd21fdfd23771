"""Spark consumers: assets, runs, the sensor that starts runs, and automation conditions."""
