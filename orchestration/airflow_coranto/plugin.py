"""The Airflow plugin: the listener of asset events."""

from __future__ import annotations

from typing import ClassVar

from airflow.providers.common.compat.sdk import AirflowPlugin

from airflow_coranto import listener


class CorantoPlugin(AirflowPlugin):
    """Brings the listener into Airflow's processes."""

    name = "coranto"
    listeners: ClassVar[list[object]] = [listener]
