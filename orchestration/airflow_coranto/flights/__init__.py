"""The flights job in Airflow: its DAGs, and an Airflow of their own over the demo's cluster."""
