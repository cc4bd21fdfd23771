"""The Airflow plugin and its listener."""
