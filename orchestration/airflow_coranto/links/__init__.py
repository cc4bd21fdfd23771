"""Links beside tasks in Airflow's UI."""
