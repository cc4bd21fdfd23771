"""The client configuration for an orchestrator: from its settings, the environment, or a cluster on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from coranto.client import ClientConfig
from coranto.client.config import AUTH_KINDS, AUTH_VARIABLES
from coranto.cluster.info import locate

ENDPOINT_VARIABLE: Final = "CORANTO_ENDPOINT"
FILE_ROOT_VARIABLE: Final = "CORANTO_FILE_ROOT"


def resolve_client_config(
    endpoint: str = "", *, data_dir: str = "", file_root: str = "", settings: Mapping[str, str] | None = None
) -> ClientConfig:
    """Return the configuration for a cluster.

    The default of `endpoint` is $CORANTO_ENDPOINT, unless `data_dir` is given; otherwise all brokers of the embedded
    cluster in `data_dir`, $CORANTO_DATA or ./.coranto, whose ports may change with each start. With an endpoint,
    `file_root` is by default $CORANTO_FILE_ROOT. `settings` are values of variables such as CORANTO_TLS_CA. Values that
    are not empty replace the environment's. A token, keys or an issuer among them replaces all variables of all three.
    Raises ClusterError when the cluster must be looked up and does not run, and InvalidInput.
    """
    root = Path(file_root) if file_root else None
    found = endpoint or ("" if data_dir else os.environ.get(ENDPOINT_VARIABLE, ""))
    if found and root is None and (folder := os.environ.get(FILE_ROOT_VARIABLE)):
        root = Path(folder)
    if not found:
        cluster = locate(Path(data_dir) if data_dir else None)
        found, root = ",".join(cluster.endpoints), root or cluster.file_root
    given = {name: value for name, value in (settings or {}).items() if value}
    environment = dict(os.environ)
    if any(name in given for name in AUTH_KINDS):
        environment = {name: value for name, value in environment.items() if name not in AUTH_VARIABLES}
    return ClientConfig.from_environment(found, root, environment=environment | given)
