"""The settings of sessions for consumers."""

import subprocess
import sys

import pytest

from coranto.errors import InvalidInput
from coranto_consumers.spark.session import sessions
from coranto_consumers.spark.session.sessions import new_session, running_session, settings_for, start_session

NAMED = "spark.python.daemon.module"


def test_without_java_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setattr(sessions, "running_session", lambda: None)
    with pytest.raises(InvalidInput, match="Java 17"):
        new_session("none")


def test_spark_submit_has_the_master_and_the_settings_of_its_session(monkeypatch):
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    with pytest.raises(InvalidInput, match="started this program, so the master cannot be given here"):
        start_session("totals", "local[2]")
    with pytest.raises(InvalidInput, match="so settings of Spark cannot be given here: give --master and --conf to"):
        start_session("totals", settings={"spark.executor.memory": "1g"})


@pytest.mark.parametrize("master", ["spark://head:7077", "yarn", "k8s://https://head:6443"])
def test_executors_on_other_machines_can_reach_the_driver(master):
    assert not {"spark.driver.host", "spark.driver.bindAddress"} & settings_for(master).keys()


@pytest.mark.parametrize("master", ["local[2]", "local[*]", "local-cluster[2,1,1024]"])
def test_a_driver_with_local_executors_is_reachable_only_locally(master):
    assert settings_for(master)["spark.driver.bindAddress"] == "127.0.0.1"


@pytest.mark.parametrize("master", ["local[2]", "spark://head:7077"])
def test_speculation_is_left_to_the_cluster(master):
    """Superseded attempts have no effect, so it is safe."""
    assert not [name for name in settings_for(master) if name.startswith("spark.speculation")]


def test_local_workers_run_compiled_modules_that_their_parent_has_imported(spark):
    """The zip of PySpark that Spark puts first has only sources, so each process would compile them again."""

    def about(batches):
        import sys

        before = set(sys.modules)
        import pyarrow as pa
        import pyspark

        for _ in batches:
            imported = before >= {"coranto_consumers.spark.source.data_source", "pandas", "pyspark.worker"}
            yield pa.record_batch({"file": [pyspark.__file__], "imported": [imported], "python": [sys.executable]})

    [row] = spark.range(1, numPartitions=1).mapInArrow(about, "file STRING, imported BOOLEAN, python STRING").collect()

    assert "pyspark.zip" not in row.file
    assert row.imported
    assert row.python == sys.executable


def test_the_source_imports_no_slow_modules():
    heavy = "'pydantic', 'jwt', 'cryptography', 'sqlalchemy', 'pandas'"
    code = f"import sys, coranto_consumers.spark.source.data_source; print(sorted({{{heavy}}} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_remote_executors_need_only_their_own_parent_of_workers():
    assert NAMED in settings_for("local[2]")
    assert NAMED in settings_for("local")
    assert NAMED not in settings_for("local-cluster[2,1,1024]")
    assert NAMED not in settings_for("spark://head:7077")


def test_a_short_session_keeps_the_settings_of_others(spark):
    options = spark.conf.get("spark.driver.extraJavaOptions").split()
    assert "-XX:TieredStopAtLevel=1" in options
    assert any(option.startswith("-Dlog4j2.configurationFile=") for option in options)


def test_a_querys_copy_of_the_session_is_not_mistaken_for_the_session(spark):
    spark.newSession().createDataFrame([(1,)], "number INT")
    try:
        assert type(spark).active() is not spark
        assert running_session() is spark
    finally:
        spark.createDataFrame([(1,)], "number INT")
