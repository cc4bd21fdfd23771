"""Apache Airflow provider for journals: a hook, operators, a sensor, a trigger, assets and a message queue.

Import from the modules, such as `airflow_coranto.operators.publish`. This package imports nothing, because Airflow
loads it in every process.
"""
