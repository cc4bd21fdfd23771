"""Links on tasks' pages in Airflow's UI."""
