"""Uncommitted files are removed, others stay, and a failed sweep is not an error."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.io.fsspec import FsspecFileIO
from pyiceberg.io.pyarrow import PyArrowFileIO

from coranto_consumers.stores.iceberg.files import remove_file, sweep, sweep_committed
from coranto_consumers.stores.iceberg.state import SnapshotId


def table(place: str, **named: Any) -> Any:
    properties = {"write.data.path": place}
    return SimpleNamespace(**{"properties": properties, "io": PyArrowFileIO(), "name": lambda: ("a", "b")} | named)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.parquet"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "mine" / "1"
    (folder / "day=1").mkdir(parents=True)
    for name in ("a", "b", "day=1/c"):
        (folder / f"{name}.parquet").touch()
    return folder


def test_files_stay_for_any_spelling_of_their_locations(tmp_path: Path, folder: Path) -> None:
    keep = [f"file://{folder}/a.parquet", f"{folder}//day=1/c.parquet"]
    for place in (str(tmp_path), f"file://{tmp_path}", f"file://{tmp_path.parent}//{tmp_path.name}//"):
        sweep(table(place), "mine/1/", keep)
        assert files(folder) == ["a.parquet", "c.parquet"]
    sweep(table(str(tmp_path)), "mine/1/", ["elsewhere.parquet"])
    assert not folder.exists()


@pytest.mark.parametrize("error", [OSError("away"), ValueError("no such scheme"), pa.ArrowNotImplementedError("no")])
def test_a_failed_sweep_is_not_an_error_and_removes_nothing(
    error: Exception, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    failing = PyArrowFileIO()
    for name in ("delete", "fs_by_scheme"):
        monkeypatch.setattr(failing, name, fail)
    sweep(table(str(tmp_path), io=failing), "mine/1/")
    sweep(table(str(tmp_path), io=failing), "mine/1/a.parquet")
    remove_file(table(str(tmp_path), io=failing), "a.parquet")
    sweep(table("abfs-of-nobody://lake/x", io=FsspecFileIO({})), "mine/1/")
    unread = SimpleNamespace(manifests=fail)
    sweep_committed("mine/1/", [(table(str(tmp_path), snapshot_by_id=lambda _: unread), SnapshotId(1, 1))])
    assert len(files(folder)) == 3


def test_a_sweep_of_a_table_without_committed_files_removes_all_files(tmp_path: Path, folder: Path) -> None:
    sweep_committed("mine/1/", [(table(str(tmp_path)), SnapshotId(0, 0))])
    assert files(folder) == []
