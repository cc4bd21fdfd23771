"""Exactly-once consumers on Spark, and journals as DataFrames.

Names are imported on first use. Spark's workers import this package at their start only for the data source, which
needs neither SQLAlchemy nor a database driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coranto.lazy import lazy_names

if TYPE_CHECKING:
    from coranto_consumers.journals.framings import AnyLines, CsvRecords, FixedRecords
    from coranto_consumers.outputs.dead_letters import DeadLetters, MisfitPolicy, dead_letter_table
    from coranto_consumers.spark.application.consumer_options import ConsumerOptions
    from coranto_consumers.spark.application.outputs import (
        JournalOutput,
        Outputs,
        SparkApplication,
        SqlOutput,
        TableOutput,
        Upsert,
    )
    from coranto_consumers.spark.consumer.foreach_batch import exactly_once
    from coranto_consumers.spark.consumer.metrics import SparkConsumerMetrics
    from coranto_consumers.spark.consumer.progress import ConsumeReport, Hooks, Step
    from coranto_consumers.spark.consumer.spark_consumer import SparkConsumer
    from coranto_consumers.spark.consumer.windows import WindowConsumer, WindowReport
    from coranto_consumers.spark.options.selections import stream_selector
    from coranto_consumers.spark.outputs.iceberg import IcebergStore
    from coranto_consumers.spark.session.sessions import new_session
    from coranto_consumers.spark.session.task_errors import error_of_task, errors_of_tasks
    from coranto_consumers.spark.source.data_source import register
    from coranto_consumers.spark.streaming.offsets import bytes_behind
    from coranto_consumers.stopping import StopOnSignals
    from coranto_consumers.stores.merge import Add, Max, MergeRule, Min, Quotient, Replace
    from coranto_consumers.stores.staged_sql import StagedSql

_MODULES = {
    **dict.fromkeys(
        ("JournalOutput", "Outputs", "SparkApplication", "SqlOutput", "TableOutput", "Upsert"),
        "coranto_consumers.spark.application.outputs",
    ),
    "SparkConsumer": "coranto_consumers.spark.consumer.spark_consumer",
    "ConsumerOptions": "coranto_consumers.spark.application.consumer_options",
    **dict.fromkeys(("DeadLetters", "MisfitPolicy", "dead_letter_table"), "coranto_consumers.outputs.dead_letters"),
    **dict.fromkeys(("AnyLines", "CsvRecords", "FixedRecords"), "coranto_consumers.journals.framings"),
    "IcebergStore": "coranto_consumers.spark.outputs.iceberg",
    **dict.fromkeys(("ConsumeReport", "Hooks", "Step"), "coranto_consumers.spark.consumer.progress"),
    "SparkConsumerMetrics": "coranto_consumers.spark.consumer.metrics",
    "StopOnSignals": "coranto_consumers.stopping",
    **dict.fromkeys(("WindowConsumer", "WindowReport"), "coranto_consumers.spark.consumer.windows"),
    "stream_selector": "coranto_consumers.spark.options.selections",
    "new_session": "coranto_consumers.spark.session.sessions",
    "register": "coranto_consumers.spark.source.data_source",
    **dict.fromkeys(("error_of_task", "errors_of_tasks"), "coranto_consumers.spark.session.task_errors"),
    "exactly_once": "coranto_consumers.spark.consumer.foreach_batch",
    "bytes_behind": "coranto_consumers.spark.streaming.offsets",
    **dict.fromkeys(("Add", "Max", "MergeRule", "Min", "Quotient", "Replace"), "coranto_consumers.stores.merge"),
    "StagedSql": "coranto_consumers.stores.staged_sql",
}

__all__ = [
    "Add",
    "AnyLines",
    "ConsumeReport",
    "ConsumerOptions",
    "CsvRecords",
    "DeadLetters",
    "FixedRecords",
    "Hooks",
    "IcebergStore",
    "JournalOutput",
    "Max",
    "MergeRule",
    "Min",
    "MisfitPolicy",
    "Outputs",
    "Quotient",
    "Replace",
    "SparkApplication",
    "SparkConsumer",
    "SparkConsumerMetrics",
    "SqlOutput",
    "StagedSql",
    "Step",
    "StopOnSignals",
    "TableOutput",
    "Upsert",
    "WindowConsumer",
    "WindowReport",
    "bytes_behind",
    "dead_letter_table",
    "error_of_task",
    "errors_of_tasks",
    "exactly_once",
    "new_session",
    "register",
    "stream_selector",
]

__getattr__ = lazy_names(__name__, _MODULES)
