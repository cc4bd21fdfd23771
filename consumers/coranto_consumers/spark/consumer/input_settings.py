"""The settings of a consumer's input, and its reader."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyspark.sql import SparkSession

from coranto.client import ClientConfig, JournalInfo, SyncJournalClient
from coranto.client.config import require_client
from coranto_consumers.outputs.dead_letters import policy_of
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_consumers.spark.application.outputs import NamesMessageType, SparkApplication
from coranto_consumers.spark.inputs.frames import parse_schema, require_ddl
from coranto_consumers.spark.inputs.input_reader import InputReader
from coranto_consumers.spark.journals.discovery import JournalLabels, list_journals
from coranto_consumers.spark.journals.framings import labels_of
from coranto_consumers.spark.options.message_types import ResolvedType, resolve_type

_ANY_LABELS = JournalLabels(content_type=None)


class InputSettings:
    """The settings of a consumer's input.

    `spark` may be a function that starts a session. `name` is the consumer's. With a registry, the first listing of
    journals resolves the message type, which then stays the same.
    """

    def __init__(
        self,
        application: SparkApplication,
        client: ClientConfig,
        spark: SparkSession | Callable[[], SparkSession],
        options: ConsumerOptions,
        name: str,
    ) -> None:
        require_client(client)
        require_ddl(application.value_schema)
        self._application = application
        self._client = client
        self._spark = spark
        self._options = options
        self._name = name
        self._type: ResolvedType | None = None

    @property
    def has_session(self) -> bool:
        """True if using the session starts none."""
        return not callable(self._spark)

    def journals(
        self, client: SyncJournalClient, wanted: str | Sequence[str], *, field: str
    ) -> tuple[JournalInfo, ...]:
        """Return the journals of a label selector or a list of names. Checks that their labels fit the input.

        Raises as `list_journals` and, with a registry, `resolve_type`.
        """
        if self._options.registry is None:
            return list_journals(client, wanted, field=field, labels=labels_of(self._options.chosen_framing))
        if self._type is None:
            found = list_journals(client, wanted, field=field, labels=_ANY_LABELS)
            named = self._application.message_type if isinstance(self._application, NamesMessageType) else None
            self._type = resolve_type(client, self._options.registry, found, named)
        return list_journals(client, wanted, field=field, labels=self._type.labels)

    def reader(self) -> InputReader:
        """Return the reader of the input. Starts the session if needed."""
        found = self._type
        return InputReader(
            self._spark() if callable(self._spark) else self._spark,
            self._client,
            parse_schema(self._application.value_schema, None if found is None else found.schema),
            self._options.max_partition_bytes,
            misfits=policy_of(self._options.misfits),
            framing=self._options.chosen_framing if found is None else found.framing,
            name=self._name,
        )
