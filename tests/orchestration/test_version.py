from __future__ import annotations

from importlib.metadata import version

from dagster_shared.libraries import DagsterLibraryRegistry

from dagster_coranto import __version__


def test_dagster_knows_the_librarys_version_which_is_that_of_the_distribution() -> None:
    assert __version__ == version("coranto")
    assert DagsterLibraryRegistry.get()["dagster-coranto"] == __version__
