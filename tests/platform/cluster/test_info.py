"""The file that programs use to find a cluster."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from coranto.cluster import ClusterInfo, locate
from coranto.cluster import info as cluster_info
from coranto.cluster.info import CLUSTER_FILE
from coranto.errors import ClusterError


def info(data_dir: Path) -> ClusterInfo:
    return ClusterInfo(
        data_dir=data_dir,
        etcd="127.0.0.1:1",
        etcd_prefix="/p",
        endpoints=("127.0.0.1:2", "127.0.0.1:3"),
        file_root=data_dir / "fragments",
        pids={"cluster": os.getpid(), "etcd": 5},
    )


def test_a_cluster_is_located_by_argument_environment_or_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = info(tmp_path / ".coranto")
    cluster_info.save(saved)
    assert locate(tmp_path / ".coranto") == saved
    assert saved.endpoint == "127.0.0.1:2"
    monkeypatch.delenv("CORANTO_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    assert locate() == saved
    monkeypatch.setenv("CORANTO_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(ClusterError, match=r"elsewhere.*coranto up"):
        locate()
    monkeypatch.setenv("CORANTO_DATA", str(tmp_path / ".coranto"))
    assert locate() == saved


def test_a_cluster_with_a_dead_or_reused_process_id_does_not_run(tmp_path: Path) -> None:
    cluster_info.save(info(tmp_path), running=False)
    with pytest.raises(ClusterError, match="no cluster runs"):
        locate(tmp_path)
    cluster_info.save(info(tmp_path))
    content = json.loads((tmp_path / CLUSTER_FILE).read_text())
    for change in ({"started": "1"}, {"pids": {"cluster": 4_000_000}}, {"pids": {}}, {"endpoints": None}):
        (tmp_path / CLUSTER_FILE).write_text(json.dumps(content | change))
        with pytest.raises(ClusterError, match="no cluster runs"):
            locate(tmp_path)
    (tmp_path / CLUSTER_FILE).write_text("{")
    with pytest.raises(ClusterError, match="no cluster runs"):
        locate(tmp_path)


def test_a_cluster_without_brokers_is_reported(tmp_path: Path) -> None:
    lonely = ClusterInfo(tmp_path, "127.0.0.1:1", "/p", (), tmp_path, {"cluster": os.getpid()})
    with pytest.raises(ClusterError, match="without brokers"):
        _ = lonely.endpoint
