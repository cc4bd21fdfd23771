"""The choice and the download of `--kafka`. Nothing is downloaded: Maven is missing, or a fake."""

from __future__ import annotations

from pathlib import Path

import pyspark
import pytest

from benchmarks import kafka
from benchmarks.__main__ import BENCHMARKS, KAFKA_BENCHMARKS, chosen
from coranto.errors import InvalidInput, Unavailable


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no program on the PATH."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    return kafka.cache_folder()


def test_kafka_is_excluded_by_default() -> None:
    assert chosen([], kafka=False) == BENCHMARKS
    assert chosen(["spark_source"], kafka=False) == {"spark_source": BENCHMARKS["spark_source"]}
    assert not set(chosen([], kafka=False).values()) & set(KAFKA_BENCHMARKS.values())


def test_results_with_kafka_have_separate_names() -> None:
    assert chosen(["spark_source"], kafka=True) == {"spark_source_kafka": KAFKA_BENCHMARKS["spark_source"]}
    assert chosen([], kafka=True).keys() == {"kafka_to_table", "spark_sink_kafka", "spark_source_kafka"}


def test_a_benchmark_without_a_kafka_variant_is_refused() -> None:
    with pytest.raises(
        InvalidInput, match="no benchmark that compares with Kafka is named append; there are kafka_to_table, spark_"
    ):
        chosen(["spark_source", "append"], kafka=True)
    with pytest.raises(InvalidInput, match="no benchmark is named nothing"):
        chosen(["nothing"], kafka=False)


def test_without_maven_the_error_advises_to_install_it(cache: Path) -> None:
    with pytest.raises(InvalidInput, match=r"no command mvn to fetch spark-sql-kafka-0-10_.*: install Maven"):
        kafka.fetched()
    assert not cache.exists()


def test_a_failed_fetch_leaves_no_files(cache: Path) -> None:
    maven = cache.parents[1] / "bin" / "mvn"
    maven.write_text("#!/bin/sh\necho not in any registry\nexit 1\n")
    maven.chmod(0o700)
    with pytest.raises(Unavailable, match="ended with 1 and said: not in any registry"):
        kafka.fetched()
    assert not list(cache.iterdir())


def test_cached_files_are_not_fetched_again(cache: Path) -> None:
    connector = cache / f"connector-{pyspark.__version__}"
    connector.mkdir(parents=True)
    for name in ("kafka-clients-3.9.2.jar", "spark-sql-kafka-0-10_2.13-4.2.0.jar", "scala-library-2.13.1.jar"):
        (connector / name).touch()
    for name in ("broker-3.9.2", f"python-{kafka.python_version()}"):
        (cache / name).mkdir()
    found = kafka.fetched()
    assert [jar.name for jar in found.connector] == ["kafka-clients-3.9.2.jar", "spark-sql-kafka-0-10_2.13-4.2.0.jar"]
    assert (found.connector_version, found.broker) == (pyspark.__version__, cache / "broker-3.9.2")
    assert set(found.settings["spark.jars"].split(",")) == {str(jar) for jar in found.connector}


@pytest.mark.parametrize(
    ("spark", "versions"),
    [("4.3.1", ["4.3.1", "4.3.0", "4.2.0"]), ("4.3.0", ["4.3.0", "4.2.0"]), ("5.0.0", ["5.0.0"])],
)
def test_the_connector_of_the_previous_release_is_the_fallback(spark: str, versions: list[str]) -> None:
    assert kafka.connector_versions(spark) == versions
