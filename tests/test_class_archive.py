"""The tool that makes the class archive reports failures."""

from pathlib import Path

import pytest

from coranto.errors import Unavailable
from coranto_consumers.spark.session.class_archive import find_archive
from tools.class_archive import make_archive


def test_a_failed_session_leaves_no_archive_and_reports_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java = tmp_path / "java" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text("#!/bin/sh\necho this is no Java >&2\nexit 3\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "java"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache"))
    with pytest.raises(Unavailable, match=r"sessions start without it.*JAVA_GATEWAY_EXITED"):
        make_archive()
    assert find_archive() is None
    assert list((tmp_path / "a cache" / "coranto").iterdir()) == []
