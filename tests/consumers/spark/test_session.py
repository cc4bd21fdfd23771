"""The settings of sessions for consumers."""

import pytest

from coranto.errors import InvalidInput
from coranto_consumers.spark.session import new_session, settings_for


def test_without_java_a_session_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(InvalidInput, match="Java 17"):
        new_session("none")


@pytest.mark.parametrize("master", ["spark://head:7077", "yarn", "k8s://https://head:6443"])
def test_executors_on_other_machines_can_reach_the_driver(master):
    assert not {"spark.driver.host", "spark.driver.bindAddress"} & settings_for(master).keys()


@pytest.mark.parametrize("master", ["local[2]", "local[*]", "local-cluster[2,1,1024]"])
def test_a_driver_whose_executors_are_here_is_reached_from_here_only(master):
    assert settings_for(master)["spark.driver.bindAddress"] == "127.0.0.1"


@pytest.mark.parametrize("master", ["local[2]", "spark://head:7077"])
def test_speculation_is_left_to_the_cluster(master):
    """Attempts that lose have no effect, so nothing forbids it."""
    assert not [name for name in settings_for(master) if name.startswith("spark.speculation")]
