"""Spark consumers: their assets, their runs, the sensor that starts these, and automation conditions."""
