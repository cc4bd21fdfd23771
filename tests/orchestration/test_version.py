from __future__ import annotations

from importlib.metadata import version

from dagster_shared.libraries import DagsterLibraryRegistry

from dagster_coranto import __version__


def test_the_distributions_version_is_registered_in_dagster() -> None:
    assert __version__ == version("coranto")
    assert DagsterLibraryRegistry.get()["dagster-coranto"] == __version__
