"""A small version of the large run (`large_run.py`), compared with DuckDB."""

import pytest

from coranto.client import ClientConfig
from coranto.cluster import EmbeddedCluster
from tests.consumers.spark.large_run import LargeRun


@pytest.mark.exhaustive
def test_rows_read_and_consumed_match_duckdbs_reading_of_the_lines(spark, postgres, tmp_path):
    with EmbeddedCluster(tmp_path / "cluster", etcd_fsync=False) as cluster:
        config = ClientConfig(cluster.info.endpoint, cluster.info.file_root, retry_timeout=300.0)
        run = LargeRun(spark, config, postgres.new_database(), tmp_path, 20_000, 8, fragment_bytes=256 << 10)
        run.write()
        run.read()
        transactions = run.consume()
        counts = run.compare()

    assert transactions >= 2
    assert counts["distinct"] == 20_000
    assert counts["committed"] < counts["distinct"] < counts["messages"] < counts["lines"]
