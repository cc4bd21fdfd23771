"""The archive of classes is used only if it is complete."""

from pathlib import Path

import pytest

from coranto_consumers.spark.session.class_archive import archive_location, archive_options, find_archive


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with an empty cache, and a Java that ends immediately."""
    java = tmp_path / "java" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text("#!/bin/sh\necho this is not Java >&2\nexit 3\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "java"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache"))
    return tmp_path


def archived(content: bytes) -> Path:
    folder, name = archive_location() or pytest.fail("there is no location for an archive")
    folder.mkdir(parents=True)
    path = folder / f"{name}-6.jsa"
    path.write_bytes(content)
    return path


def test_a_complete_archive_is_used(home: Path) -> None:
    assert (find_archive(), archive_options()) == (None, "")
    path = archived(b"whole!")
    assert find_archive() == path
    assert archive_options().startswith(f'"-XX:SharedArchiveFile={path}" ')


def test_a_truncated_archive_is_not_used(home: Path) -> None:
    """Java would crash when it loads it."""
    archived(b"who")
    assert (find_archive(), archive_options()) == (None, "")


def test_an_archive_of_another_java_is_not_used(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archived(b"whole!")
    other = home / "other" / "bin" / "java"
    other.parent.mkdir(parents=True)
    other.write_text("#!/bin/sh\n")
    monkeypatch.setenv("JAVA_HOME", str(home / "other"))
    assert find_archive() is None
    monkeypatch.setenv("JAVA_HOME", str(home / "none"))
    assert find_archive() is None
