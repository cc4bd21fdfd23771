from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest
import yaml

from coranto.errors import InvalidInput
from coranto.specs.journal_tree import parse_tree
from coranto_flights.names import TREE
from dagster_coranto.flights import config, definitions
from dagster_coranto.flights.definitions import ALERTS, EVENTS, defs
from dagster_coranto.flights.materialize import Job, consumer_name, fail_abandoned_runs, store_url

ROOT = Path(__file__).parents[3]


def test_definitions_load_without_a_cluster_and_without_spark_or_pandas(tmp_path: Path) -> None:
    code = (
        "import sys; from dagster_coranto.flights.definitions import defs; defs.resolve_asset_graph();"
        "found = {'pyspark', 'pandas', 'sqlalchemy'} & set(sys.modules); sys.exit(str(found) if found else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env={"CORANTO_DATA": str(tmp_path)})


def test_the_lineage_has_specs_events_delays_and_alerts() -> None:
    graph = defs.resolve_asset_graph()
    lineage = {
        key.to_user_string(): sorted(parent.to_user_string() for parent in graph.get(key).parent_keys)
        for key in graph.get_all_asset_keys()
    }
    assert lineage == {
        "journal_specs": [],
        "flights/events": ["journal_specs"],
        "carrier_delays": ["flights/events"],
        "flights/alerts": ["flights/events"],
    }
    checked = {key.asset_key.to_user_string() for key in graph.asset_check_keys}
    assert checked == {"flights/events", "flights/alerts"}


def test_the_workspace_names_the_code_location() -> None:
    (location,) = yaml.safe_load((ROOT / "workspace.yaml").read_text())["load_from"]
    assert location["python_module"] == {
        "module_name": definitions.__name__,
        "attribute": "defs",
        "location_name": "dagster_coranto",
    }


def test_the_tree_has_exactly_the_journals_of_the_groups() -> None:
    tree = parse_tree(TREE.read_text())
    assert [change.upsert.name for change in tree] == [
        *(f"{EVENTS.name}/part-{index:03}" for index in range(4)),
        f"{ALERTS.name}/part-000",
    ]
    assert {change.upsert.replication for change in tree} == {1}


def test_a_job_can_be_serialized_and_becomes_run_configuration() -> None:
    job = Job("second/", "carrier_delays_second", 500, 1 << 20)
    assert Job.from_json(job.to_json()) == job
    assert job.run_config == {
        "resources": {
            "journals": {"config": {"prefix": "second/"}},
            "flights": {"config": {"table": "carrier_delays_second", "limit": 500, "max_transaction_bytes": 1 << 20}},
        }
    }
    assert consumer_name(job) == "second/carrier-delays"


@pytest.mark.parametrize("text", ["", "[]", '{"nonsense": 1}', "nonsense"])
def test_invalid_jobs_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="is not a job"):
        Job.from_json(text)


def test_the_store_is_next_to_the_data_unless_the_environment_names_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(config.STORE_VARIABLE, raising=False)
    assert store_url(tmp_path) == f"sqlite:///{tmp_path}/store.db"
    monkeypatch.setenv(config.STORE_VARIABLE, "postgresql+psycopg://h/d")
    assert store_url(tmp_path) == "postgresql+psycopg://h/d"


def test_runs_of_ended_processes_are_marked_failed() -> None:
    @dg.job
    def empty() -> None: ...

    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with dg.DagsterInstance.ephemeral() as instance:
        runs = {
            name: instance.create_run_for_job(empty, status=dg.DagsterRunStatus.STARTED, tags=tags)
            for name, tags in {
                "gone": {"coranto/pid": str(ended.pid), "coranto/process-start": "1"},
                "other": {"coranto/pid": "1", "coranto/process-start": "not this one"},
                "somebody else's": {},
            }.items()
        }
        assert set(fail_abandoned_runs(instance)) == {runs["gone"].run_id, runs["other"].run_id}
        after = {name: instance.get_run_by_id(run.run_id) for name, run in runs.items()}
        statuses = {name: run.status.value for name, run in after.items() if run is not None}
        assert statuses == {"gone": "FAILURE", "other": "FAILURE", "somebody else's": "STARTED"}
