"""The Airflow plugin, and the listener that it brings."""
