"""Journals in Apache Airflow: a hook, a trigger, assets and operators.

Import from the modules: `airflow_coranto.assets`, `airflow_coranto.operators`, `airflow_coranto.trigger`. This module
imports nothing, because Airflow loads it in every process.
"""
