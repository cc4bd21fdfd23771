"""The number of concurrent tasks, which determines the number of slices of a transaction's input."""

import pytest
from pyspark.errors import PySparkAttributeError

from coranto_consumers.spark.inputs.input_reader import cores


class ConnectSession:
    """A session of Spark Connect, with settings but no context."""

    def __init__(self, **settings: str) -> None:
        self._settings = {name.replace("_", "."): value for name, value in settings.items()}

    @property
    def conf(self) -> "ConnectSession":
        return self

    @property
    def sparkContext(self) -> None:
        raise PySparkAttributeError(errorClass="JVM_ATTRIBUTE_NOT_SUPPORTED", messageParameters={"attr_name": "x"})

    def get(self, name: str, default: str) -> str:
        return self._settings.get(name, default)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 2),
        ({"spark_default_parallelism": "7", "spark_master": "local[2]"}, 7),
        ({"spark_master": "local[5]"}, 5),
        ({"spark_master": "local[5,3]"}, 5),
        ({"spark_master": "local-cluster[8, 2, 1024]"}, 16),
        ({"spark_master": "spark://a:7077", "spark_cores_max": "24"}, 24),
        ({"spark_master": "spark://a:7077", "spark_executor_cores": "4", "spark_executor_instances": "5"}, 20),
    ],
)
def test_cores_come_from_the_settings_without_a_context(settings, expected):
    assert cores(ConnectSession(**settings)) == expected


def test_cores_of_a_session_are_those_it_reports(spark):
    assert cores(spark) == 2
