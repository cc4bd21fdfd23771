"""Metadata of this provider, which Airflow reads through the entry point `apache_airflow_provider`."""

from __future__ import annotations

from typing import Any, Final

_INTEGRATION: Final = "Coranto"
_TEXT: Final = {"type": ["string", "null"]}
FIELD_BEHAVIOUR: Final[dict[str, Any]] = {
    "hidden-fields": ["login"],
    "relabeling": {"host": "Brokers", "schema": "http or https", "password": "Token, keys or secret"},
    "placeholders": {"host": "broker-1:8080,broker-2:8080", "schema": "https"},
}
CONNECTION_FIELDS: Final[dict[str, dict[str, Any]]] = {
    name: {"label": label, "schema": _TEXT}
    for name, label in {
        "auth": "The password is (token, keys or oidc)",
        "oidc_issuer": "URL of an OpenID Connect provider",
        "oidc_client_id": "Id of this client there",
        "oidc_scope": "Scope of its tokens",
        "oidc_audience": "Audience of its tokens",
        "tls_ca": "PEM file of authorities to trust",
        "tls_cert": "PEM file of a client certificate",
        "tls_key": "PEM file of its key",
        "zone": "Zone to read from first",
        "file_root": "Folder of file:/// stores",
        "data_dir": "Folder of an embedded cluster",
        "cluster": "Name of the cluster in asset URIs",
    }.items()
}


def get_provider_info() -> dict[str, Any]:
    """Return the provider's metadata: hook, trigger, sensor, operators, assets and queue."""
    return {
        "package-name": "coranto",
        "name": _INTEGRATION,
        "description": "Replicated, transactional, append-only journals",
        "integrations": [{"integration-name": _INTEGRATION, "external-doc-url": "", "tags": ["software"]}],
        "hooks": _modules("hooks", "coranto"),
        "triggers": _modules("triggers", "journal"),
        "sensors": _modules("sensors", "journal"),
        "operators": _modules("operators", "audit", "ingest", "publish", "recovery", "spark", "specs", "table"),
        "connection-types": [
            {
                "connection-type": "coranto",
                "hook-class-name": "airflow_coranto.hooks.coranto.CorantoHook",
                "hook-name": _INTEGRATION,
                "ui-field-behaviour": FIELD_BEHAVIOUR,
                "conn-fields": CONNECTION_FIELDS,
            }
        ],
        "asset-uris": [
            {
                "schemes": ["journal"],
                "handler": "airflow_coranto.assets.journal.sanitize_uri",
                "factory": "airflow_coranto.assets.journal.journal_asset",
                "to_openlineage_converter": "airflow_coranto.assets.journal.to_openlineage",
            }
        ],
        "queues": ["airflow_coranto.queues.journal.JournalMessageQueueProvider"],
        "extra-links": ["airflow_coranto.links.report.ReportLink"],
        "task-decorators": [
            {"name": "journal_publish", "class-name": "airflow_coranto.decorators.publish.journal_publish_task"}
        ],
    }


def _modules(package: str, *names: str) -> list[dict[str, Any]]:
    """Return the modules of a package, in the format of Airflow's provider metadata."""
    modules = [f"airflow_coranto.{package}.{name}" for name in names]
    return [{"integration-name": _INTEGRATION, "python-modules": modules}]
