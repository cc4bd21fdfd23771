"""URL of a consumer's SQL store, from an Airflow connection."""

from __future__ import annotations

from typing import Any

from airflow_coranto.store_url import checked_store_url, store_url

__all__ = ["checked_store_url", "store_url_of_connection"]


def store_url_of_connection(conn_id: str) -> str:
    """Return the SQLAlchemy URL of a connection. Airflow masks its password in logs."""
    from airflow.providers.common.compat.sdk import BaseHook

    connection: Any = BaseHook.get_connection(conn_id)
    return store_url(
        connection.conn_type,
        host=connection.host or "",
        port=connection.port,
        database=connection.schema or "",
        login=connection.login or "",
        password=connection.password or "",
        extra=connection.extra_dejson,
    )
