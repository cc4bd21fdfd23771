"""Dead letters of a Spark consumer, as outputs of its transactions (see `outputs.dead_letters`)."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from coranto_consumers.outputs.dead_letters import COLUMNS, DeadLetters, dead_letter_table, policy_of
from coranto_consumers.spark.application.outputs import JournalOutput, Outputs, TableOutput

__all__ = ["DeadLetters", "dead_letter_outputs", "dead_letter_table", "no_letters", "policy_of"]


def no_letters(nothing: DataFrame) -> DataFrame:
    """Return a frame of `COLUMNS` without rows, made from another frame without rows."""
    types = ("STRING", "BIGINT", "BINARY")
    return nothing.selectExpr(*(f"CAST(NULL AS {kind}) AS {name}" for name, kind in zip(COLUMNS, types, strict=True)))


def dead_letter_outputs(letters: DeadLetters, dead: DataFrame) -> Outputs:
    """Return the output for rows of `COLUMNS`."""
    if letters.table is not None:
        return Outputs(tables=[TableOutput(letters.table, dead.select(*COLUMNS))])
    value = F.struct("journal", "offset", F.base64("line").alias("line"))
    return Outputs(
        journals=[JournalOutput(dead.select(F.col("journal").alias("key"), value.alias("value")), letters.journals)]
    )
