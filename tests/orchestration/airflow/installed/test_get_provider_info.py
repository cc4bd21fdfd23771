"""The provider information for Airflow: every named object exists."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

import airflow
from airflow.providers.common.messaging.triggers.msg_queue import MessageQueueTrigger
from airflow.providers_manager import ProvidersManager
from packaging.version import Version

from airflow_coranto.get_provider_info import get_provider_info
from airflow_coranto.triggers.journal import JournalOffsetTrigger


def test_every_named_module_and_class_exists() -> None:
    info = get_provider_info()
    modules = [
        module
        for part in ("hooks", "triggers", "operators")
        for entry in info[part]
        for module in entry["python-modules"]
    ]
    classes = [
        info["connection-types"][0]["hook-class-name"],
        *(info["asset-uris"][0][name] for name in ("handler", "factory", "to_openlineage_converter")),
        *info["queues"],
        *info["extra-links"],
        info["task-decorators"][0]["class-name"],
    ]
    for name in modules:
        assert importlib.import_module(name)
    for path in classes:
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name), path


def test_airflow_finds_the_provider() -> None:
    manager = ProvidersManager()
    assert "coranto" in manager.providers
    hook = manager.hooks["coranto"]
    assert hook is not None
    assert hook.hook_class_name == "airflow_coranto.hooks.coranto.CorantoHook"
    assert "airflow_coranto.queues.journal.JournalMessageQueueProvider" in manager.queue_class_names
    assert "journal" in manager.asset_uri_handlers
    if Version(airflow.__version__) >= Version("3.2"):  # Earlier versions declare fields only in Flask's forms.
        assert "extra__coranto__tls_ca" in manager.connection_form_widgets


def test_journals_are_a_message_queue() -> None:
    trigger = MessageQueueTrigger(scheme="journal", group="flights/events", name="events")
    path, arguments = trigger.serialize()
    assert path == "airflow_coranto.triggers.journal.JournalOffsetTrigger"
    assert JournalOffsetTrigger(**arguments).variable == "coranto_watcher.events"


def test_the_entry_point_names_the_function() -> None:
    values = {each.value for each in entry_points(group="apache_airflow_provider")}
    assert "airflow_coranto.get_provider_info:get_provider_info" in values
