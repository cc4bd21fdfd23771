"""Groups of journals as Airflow assets."""
