from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest
from dagster._core.nux import get_has_seen_nux
from dagster._core.run_coordinator import DefaultRunCoordinator

from dagster_coranto.instance.home import dagster_environment, prepare_home, prepare_storage


def test_an_instance_of_the_home_starts_runs_immediately_and_sends_no_telemetry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = prepare_home(tmp_path)
    assert home == tmp_path / "dagster"
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    with dg.DagsterInstance.get() as instance:
        assert instance.telemetry_enabled is False
        assert get_has_seen_nux()  # type: ignore[no-untyped-call]
        assert isinstance(instance.run_coordinator, DefaultRunCoordinator)
        assert Path(instance.root_directory) == home


def test_existing_settings_are_kept(tmp_path: Path) -> None:
    settings = prepare_home(tmp_path) / "dagster.yaml"
    settings.write_text("telemetry: {enabled: false}\nretention: {}\n")
    prepare_home(tmp_path)
    assert settings.read_text() == "telemetry: {enabled: false}\nretention: {}\n"


def test_dagster_processes_get_home_and_cluster(tmp_path: Path) -> None:
    environment = dagster_environment(tmp_path, {"PATH": "/bin", "CORANTO_DATA": "elsewhere"})
    assert environment == {
        "PATH": "/bin",
        "CORANTO_DATA": str(tmp_path),
        "DAGSTER_HOME": str(tmp_path / "dagster"),
        "DAGSTER_DISABLE_TELEMETRY": "1",
        "DAGSTER_DG_UPDATE_CHECK_ENABLED": "0",
        "GRPC_VERBOSITY": "ERROR",
        "GRPC_ENABLE_FORK_SUPPORT": "false",
    }


def test_prepared_databases_need_no_migration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_storage(tmp_path)
    home = prepare_home(tmp_path)
    databases = {path: path.read_bytes() for path in home.rglob("*.db")}
    assert {path.name for path in databases} == {"runs.db", "index.db", "schedules.db"}
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    with dg.DagsterInstance.get() as instance:
        instance.get_runs_count()
        instance.event_log_storage.get_maximum_record_id()
        instance.all_instigator_state()
    assert {path: path.read_bytes() for path in home.rglob("*.db")} == databases
