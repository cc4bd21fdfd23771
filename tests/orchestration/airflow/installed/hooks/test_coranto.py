"""The hook over a real broker: connections that are defined, those that are not, and Airflow's form."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from airflow.models import Connection
from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException

from airflow_coranto.get_provider_info import CONNECTION_FIELDS
from airflow_coranto.hooks.coranto import CorantoHook
from airflow_coranto.operators.audit import AuditOperator
from coranto.client import SyncJournalClient
from coranto.errors import ClusterError, InvalidInput
from coranto.testing import SyncCluster

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture(autouse=True)
def nothing_defined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AIRFLOW_CONN_CORANTO_DEFAULT", "CORANTO_ENDPOINT", "CORANTO_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def test_the_button_of_the_form_tests_a_connection(client: SyncJournalClient, group: str) -> None:
    listed = len(client.list().journals)
    made = Connection(conn_id="coranto_default", conn_type="coranto")
    assert made.test_connection() == (True, f"the cluster has {listed} journals")
    os.environ["AIRFLOW_CONN_CORANTO_DEFAULT"] = "coranto://me@127.0.0.1:1"
    is_good, problem = made.test_connection()
    assert not is_good
    assert "no users" in problem


def test_an_undefined_default_connection_is_the_cluster_of_commands(
    broker: SyncCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORANTO_ENDPOINT", broker.endpoint)
    hook = CorantoHook()
    with hook.get_conn() as client:
        assert client.config.endpoint == broker.endpoint
    assert asyncio.run(hook.async_fields()).client_config().endpoint == broker.endpoint
    assert hook.cluster_name() == "coranto_default"


def test_without_a_cluster_the_error_has_the_line_to_export(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterError) as missing:
        CorantoHook().client_config()
    with pytest.raises(AirflowException, match="no cluster runs in") as failed:
        AuditOperator(task_id="audit", group="shop/orders").execute({})
    assert not isinstance(failed.value, AirflowFailException), "a cluster may be started yet"
    for text in (str(missing.value), str(failed.value)):
        assert "export AIRFLOW_CONN_CORANTO_DEFAULT='coranto://HOST:PORT' " in text


def test_the_printed_line_defines_the_connection_as_it_is(broker: SyncCluster) -> None:
    with pytest.raises(InvalidInput) as missing:
        CorantoHook("prod").client_config()
    line = re.search(r"export AIRFLOW_CONN_PROD='[^']+'", str(missing.value))
    assert line is not None
    program = (
        "from airflow_coranto.hooks.coranto import CorantoHook; print(CorantoHook('prod').client_config().endpoint)"
    )
    shell = f'{line.group().replace("HOST:PORT", broker.endpoint.removeprefix("http://"))}; exec "$0" -c "$1"'
    ran = subprocess.run(
        ["sh", "-c", shell, sys.executable, program], capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert ran.stdout.split()[-1].removeprefix("http://") == broker.endpoint.removeprefix("http://")


@pytest.mark.parametrize(
    "conn_id", ["prod", "another-one"], ids=["a name that a shell exports", "one that no shell exports"]
)
def test_other_connections_that_are_not_defined_fail_a_task_without_a_retry(conn_id: str) -> None:
    with pytest.raises(AirflowFailException, match=f"connection '{conn_id}' is not defined; define it: ") as failed:
        AuditOperator(task_id="audit", group="shop/orders", coranto_conn_id=conn_id).execute({})
    line = {"prod": "export AIRFLOW_CONN_PROD=", "another-one": "airflow connections add another-one --conn-uri "}
    assert f"{line[conn_id]}'coranto://HOST:PORT'" in str(failed.value)


FORM = """
from airflow.api_fastapi.core_api.services.ui.connections import HookMetaService

(form,) = (each for each in HookMetaService.hook_meta_data() if each.connection_type == "coranto")
print(*form.extra_fields, form.standard_fields.login.hidden)
"""


def test_the_form_of_a_connection_has_the_fields_of_extra() -> None:
    """Before 3.2 Airflow takes them from the hook. A process that has loaded providers before has no fields then."""
    ran = subprocess.run([sys.executable, "-c", FORM], capture_output=True, text=True, check=True, env={**os.environ})
    assert ran.stdout.splitlines()[-1].split() == [*CONNECTION_FIELDS, "True"]
