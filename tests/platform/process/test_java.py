"""The Java of this machine: `JAVA_HOME` precedes the PATH."""

from __future__ import annotations

from pathlib import Path

import pytest

from coranto.process.java import java_program


def test_java_is_found_by_java_home_or_by_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    assert java_program() is None
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\n")
    java.chmod(0o755)
    assert java_program() == java
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    assert java_program() == tmp_path / "home" / "bin" / "java"
    monkeypatch.setenv("JAVA_HOME", "")
    assert java_program() == java
