"""The hook with a real broker: defined and missing connections, and Airflow's form."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from airflow.models import Connection
from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException, AirflowNotFoundException

from airflow_coranto.get_provider_info import CONNECTION_FIELDS
from airflow_coranto.hooks.coranto import CorantoHook
from airflow_coranto.operators.audit import AuditOperator
from airflow_coranto.sensors.journal import JournalSensor
from coranto.client import SyncJournalClient
from coranto.testing import SyncCluster

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture(autouse=True)
def nothing_defined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AIRFLOW_CONN_CORANTO_DEFAULT", "CORANTO_ENDPOINT", "CORANTO_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def test_the_button_of_the_form_tests_a_connection(
    client: SyncJournalClient, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = len(client.list().journals)
    made = Connection(conn_id="coranto_default", conn_type="coranto")
    assert made.test_connection() == (True, f"the cluster has {listed} journals")
    monkeypatch.setenv("AIRFLOW_CONN_CORANTO_DEFAULT", "coranto://me@127.0.0.1:1")
    is_good, problem = made.test_connection()
    assert not is_good
    assert "no users" in problem


@pytest.mark.parametrize("conn_id", ["coranto_default", "prod"])
@pytest.mark.parametrize("value", ["coranto://HOST:PORT", "coranto://"])
def test_the_error_of_a_missing_connection_prints_lines_that_define_it(
    broker: SyncCluster, monkeypatch: pytest.MonkeyPatch, conn_id: str, value: str
) -> None:
    monkeypatch.setenv("CORANTO_ENDPOINT", broker.endpoint)  # A cluster in the environment is not used by default.
    with pytest.raises(AirflowNotFoundException) as missing:
        CorantoHook(conn_id).client_config()
    with pytest.raises(AirflowNotFoundException) as awaited:
        asyncio.run(CorantoHook(conn_id).async_fields())
    assert str(awaited.value) == str(missing.value)
    lines = re.findall(r"export AIRFLOW_CONN_\w+='[^']+'", str(missing.value))
    (line,) = (each for each in lines if each.endswith(f"='{value}'"))
    address = broker.endpoint.removeprefix("http://")
    hook = f"from airflow_coranto.hooks.coranto import CorantoHook; hook = CorantoHook({conn_id!r})"
    shell = f'{line.replace("HOST:PORT", address)}; exec "$0" -c "$1"'
    program = [sys.executable, f"{hook}; print(hook.client_config().endpoint)"]
    ran = subprocess.run(["sh", "-c", shell, *program], capture_output=True, text=True, check=True, env={**os.environ})
    assert ran.stdout.split()[-1].removeprefix("http://") == address


def test_a_name_that_is_not_a_shell_variable_is_defined_by_a_command() -> None:
    with pytest.raises(AirflowNotFoundException, match="airflow connections add another-one --conn-uri 'coranto://'"):
        CorantoHook("another-one").client_config()


def test_a_task_without_its_connection_is_retried() -> None:
    """Airflow reports a failed look-up of a connection in the same way."""
    with pytest.raises(AirflowException, match="connection 'prod' is not defined") as failed:
        AuditOperator(task_id="audit", group="shop/orders", coranto_conn_id="prod").execute({})
    assert not isinstance(failed.value, AirflowFailException)
    with pytest.raises(AirflowException, match="connection 'prod' is not defined"):
        JournalSensor(task_id="wait", group="shop/orders", coranto_conn_id="prod").poke({})


FORM = """
from airflow.api_fastapi.core_api.services.ui.connections import HookMetaService

(form,) = (each for each in HookMetaService.hook_meta_data() if each.connection_type == "coranto")
print(*form.extra_fields, form.standard_fields.login.hidden)
"""


def test_the_form_of_a_connection_has_the_fields_of_extra() -> None:
    """Before 3.2, Airflow gets them from the hook, and only in a process that has not loaded providers before."""
    ran = subprocess.run([sys.executable, "-c", FORM], capture_output=True, text=True, check=True, env={**os.environ})
    assert ran.stdout.splitlines()[-1].split() == [*CONNECTION_FIELDS, "True"]
