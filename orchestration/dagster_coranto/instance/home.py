"""Dagster's home folder in a cluster's data folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import dagster as dg

_TEMPLATE = """\
# Written by Coranto when it starts Dagster; changes are kept as long as this file exists.
telemetry:
  enabled: false
# Runs start immediately, without the daemon: a consumer's fence, not a queue, keeps two of them apart.
run_coordinator:
  module: dagster._core.run_coordinator
  class: DefaultRunCoordinator
# The daemon evaluates freshness policies.
freshness:
  enabled: true
# The output of a run goes to its process's output, so that a terminal shows progress immediately.
compute_logs:
  module: dagster._core.storage.noop_compute_log_manager
  class: NoOpComputeLogManager
"""


def prepare_home(data_dir: Path) -> Path:
    """Create `data_dir`/dagster as a DAGSTER_HOME if it is missing, and return its absolute path.

    Telemetry is off, and the UI does not ask for an e-mail address. Existing files are not changed.
    """
    home = (data_dir / "dagster").absolute()
    for path, content in ((home / "dagster.yaml", _TEMPLATE), (home / ".nux" / "nux.yaml", "seen: 1\n")):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(content)
    return home


def prepare_storage(data_dir: Path) -> None:
    """Create the missing databases of the instance below `data_dir`.

    Dagster's processes create them at their first use, and their concurrent migrations fail. So call this before you
    start more than one process.
    """
    with dg.DagsterInstance.from_config(str(prepare_home(data_dir))) as instance:
        instance.get_runs_count()
        instance.event_log_storage.get_maximum_record_id()
        instance.all_instigator_state()


def dagster_environment(data_dir: Path, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for Dagster processes that use the cluster below `data_dir`.

    It extends `base`, by default this process's environment.
    """
    return {
        **(os.environ if base is None else base),
        "DAGSTER_HOME": str(prepare_home(data_dir)),
        "DAGSTER_DISABLE_TELEMETRY": "1",
        "DAGSTER_DG_UPDATE_CHECK_ENABLED": "0",
        "CORANTO_DATA": str(data_dir.absolute()),
        # Otherwise gRPC logs a warning for each process started while its threads run, such as Spark's.
        "GRPC_VERBOSITY": "ERROR",
        # Dagster starts gRPC before Coranto can set this; see `coranto`.
        "GRPC_ENABLE_FORK_SUPPORT": "false",
    }
