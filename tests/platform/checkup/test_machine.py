"""Checks of a machine: Java, Python, ports and folders."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from coranto.checkup import Condition, machine


def java_program(folder: Path, text: str) -> None:
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{text}' >&2\n")
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("version_text", "needed", "condition"),
    [
        ('openjdk version "17.0.9" 2023-10-17', True, Condition.OK),
        ('openjdk version "1.8.0_392"', True, Condition.PROBLEM),
        ('openjdk version "11.0.2" 2019-01-15', True, Condition.PROBLEM),
        ('openjdk version "11.0.2" 2019-01-15', False, Condition.WARNING),
        ("no JVM", True, Condition.PROBLEM),
    ],
)
def test_java_must_be_new_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version_text: str, needed: bool, condition: Condition
) -> None:
    java_program(tmp_path, version_text)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    result = machine.java(needed=needed)
    assert result.condition is condition
    assert (condition is Condition.OK) == (result.advice == "")


def test_a_java_home_without_java_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert machine.java(needed=True).condition is Condition.PROBLEM
    assert str(tmp_path) in machine.java(needed=True).found
    assert machine.java(needed=False).condition is Condition.NOT_EXAMINED


@pytest.mark.parametrize(
    ("version", "condition"), [((3, 10), Condition.PROBLEM), ((3, 11), Condition.OK), ((3, 99), Condition.WARNING)]
)
def test_python_must_be_a_tested_version(version: tuple[int, int], condition: Condition) -> None:
    assert machine.python(version).condition is condition


def test_a_taken_port_is_reported() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        results = {each.subject: each for each in machine.ports([port])}
    assert results[f"port {port}"].condition is Condition.PROBLEM
    assert results["ports"].condition is Condition.OK


def test_a_path_that_is_not_a_folder_is_reported(tmp_path: Path) -> None:
    assert machine.data_directory(tmp_path).condition is not Condition.PROBLEM
    (tmp_path / "file").write_text("")
    assert machine.data_directory(tmp_path / "file").condition is Condition.PROBLEM
    assert not (tmp_path / ".coranto-doctor").exists()


def test_installed_parts_with_incompatible_versions_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    requires = ["grpcio>=1", 'pyspark[connect]<5,>=99; extra == "spark"', 'no-such-thing; extra == "consumers"']
    monkeypatch.setattr("importlib.metadata.requires", lambda name: requires)
    found = {each.subject: each for each in machine.parts()}
    assert found["coranto"].condition is Condition.OK
    assert found["coranto[broker]"].condition is Condition.OK
    assert found["coranto[spark]"].condition is Condition.WARNING
    assert "and must be <5,>=99" in found["coranto[spark]"].found
    assert found["coranto[consumers]"].found == "cannot be used: without no-such-thing"
    requires[0] = "grpcio>=99"
    assert machine.parts()[0].condition is Condition.PROBLEM


def test_modules_installed_by_other_packages_are_not_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PARTS", {"broker": ("json", "no_such_module"), "lake": ("no_such_module",)})
    monkeypatch.setattr("importlib.metadata.requires", lambda name: [])
    found = {each.subject: each for each in machine.parts()}
    assert found["coranto[broker]"].condition is Condition.WARNING
    assert found["coranto[broker]"].found == "cannot be used: without no_such_module"
    assert found["coranto[lake]"].condition is Condition.NOT_EXAMINED
