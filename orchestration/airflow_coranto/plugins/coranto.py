"""Airflow plugin with the listener of asset events."""

from __future__ import annotations

from airflow.providers.common.compat.sdk import AirflowPlugin

from airflow_coranto.plugins import listener


class CorantoPlugin(AirflowPlugin):
    """Plugin that registers the listener in Airflow's processes."""

    name = "coranto"
    listeners: list[object] = [listener]  # noqa: RUF012  # as the base class declares it
