"""Descriptions of jobs, which Spark's UI and event logs show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

_DESCRIPTION: Final = "spark.job.description"


@contextmanager
def described(spark: SparkSession, text: str) -> Iterator[None]:
    """Give the jobs that this thread starts in the block a description, unless they are given one in it.

    Sessions of Spark Connect have none.
    """
    try:
        context = spark.sparkContext
    except PySparkException:
        yield
        return
    before = context.getLocalProperty(_DESCRIPTION)
    context.setLocalProperty(_DESCRIPTION, text)
    try:
        yield
    finally:
        context.setLocalProperty(_DESCRIPTION, before)  # type: ignore[arg-type]  # None removes it.
