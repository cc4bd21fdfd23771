"""The facts that Airflow reads about this provider, through the entry point `apache_airflow_provider`."""

from __future__ import annotations

from typing import Any


def get_provider_info() -> dict[str, Any]:
    """Return the provider's hook, trigger, operators, assets and queue."""
    integration = "Coranto"
    text = {"type": ["string", "null"]}
    return {
        "package-name": "coranto",
        "name": integration,
        "description": "Replicated, transactional, append-only journals",
        "integrations": [{"integration-name": integration, "external-doc-url": "", "tags": ["software"]}],
        "hooks": [{"integration-name": integration, "python-modules": ["airflow_coranto.hook"]}],
        "triggers": [{"integration-name": integration, "python-modules": ["airflow_coranto.trigger"]}],
        "operators": [{"integration-name": integration, "python-modules": ["airflow_coranto.operators"]}],
        "connection-types": [
            {
                "connection-type": "coranto",
                "hook-class-name": "airflow_coranto.hook.CorantoHook",
                "hook-name": integration,
                "ui-field-behaviour": {
                    "hidden-fields": ["login"],
                    "relabeling": {"host": "Brokers", "schema": "http or https", "password": "Token or keys"},
                    "placeholders": {"host": "broker-1:8080,broker-2:8080", "schema": "https"},
                },
                "conn-fields": {
                    "auth": {"label": "The password is (token or keys)", "schema": text},
                    "tls_ca": {"label": "PEM file of authorities to trust", "schema": text},
                    "tls_cert": {"label": "PEM file of a client certificate", "schema": text},
                    "tls_key": {"label": "PEM file of its key", "schema": text},
                    "zone": {"label": "Zone to read from first", "schema": text},
                    "file_root": {"label": "Folder of file:/// stores", "schema": text},
                    "data_dir": {"label": "Folder of an embedded cluster", "schema": text},
                    "cluster": {"label": "Name of the cluster in asset URIs", "schema": text},
                },
            }
        ],
        "asset-uris": [
            {
                "schemes": ["journal"],
                "handler": "airflow_coranto.assets.sanitize_uri",
                "factory": "airflow_coranto.assets.journal_asset",
                "to_openlineage_converter": "airflow_coranto.assets.to_openlineage",
            }
        ],
        "queues": ["airflow_coranto.queue.JournalMessageQueueProvider"],
        "extra-links": ["airflow_coranto.links.ReportLink"],
        "task-decorators": [
            {"name": "journal_publish", "class-name": "airflow_coranto.operators.decorator.journal_publish_task"}
        ],
    }
