"""The flights job in Airflow: its DAGs, and a local Airflow that uses the demo's cluster."""
