"""A Kafka cluster: the topics of an ingest, with their ids, partitions and offsets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from coranto.errors import CorantoError, InvalidInput, SourceChanged, Unavailable
from coranto.ingest.kafka.options import KafkaOptions

CALL_SECONDS: Final = 15.0
_CRITICAL: Final = 2
_NONE: Final[Mapping[str, object]] = MappingProxyType({})
_MISSING: Final = frozenset((KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC))
_REFUSED: Final = frozenset(
    (
        KafkaError._AUTHENTICATION,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.UNSUPPORTED_SASL_MECHANISM,
        KafkaError._INVALID_ARG,
    )
)


class Topic(NamedTuple):
    """A topic: its id, which no other topic ever has, and the number of its partitions."""

    id: str
    partitions: int


class Offsets(NamedTuple):
    """The offsets [first, end) of a partition. Nothing beyond the end is committed."""

    first: int
    end: int


class KafkaCluster:
    """A Kafka cluster. All calls block."""

    def __init__(self, options: KafkaOptions) -> None:
        self._topics = list(options.topics)
        self._reported: dict[int, KafkaError] = {}  # The errors of connections since the last failure, by code.
        try:
            self._admin = AdminClient(client_options(options, own={"error_cb": self._report}))
        except (KafkaException, ValueError) as error:
            raise problem_of(error) from error

    def id(self) -> str:
        """Return the id of the cluster. Raises Unavailable and InvalidInput, as all calls do."""
        try:
            return str(self._admin.list_topics(timeout=CALL_SECONDS).cluster_id)
        except (KafkaException, TimeoutError) as error:
            raise self._problem(error) from error

    def topics(self, names: Iterable[str] = ()) -> dict[str, Topic]:
        """Return topics by name, by default all of the ingest. Raises SourceChanged for a topic that does not exist."""
        wanted = sorted(names) or self._topics
        found: dict[str, Topic] = {}
        for name, future in self._admin.describe_topics(TopicCollection(wanted), request_timeout=CALL_SECONDS).items():
            try:
                described = future.result(CALL_SECONDS)
            except (KafkaException, TimeoutError) as error:
                if isinstance(error, KafkaException) and error.args[0].code() in _MISSING:
                    raise SourceChanged(f"Kafka has no topic {name}: create it, or correct its name") from error
                raise self._problem(error) from error
            found[name] = Topic(str(described.topic_id), len(described.partitions))
        return found

    def offsets(self, places: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Offsets]:
        """Return the offsets of partitions."""
        if not places:
            return {}
        first, end = (self._list(places, spec) for spec in (OffsetSpec.earliest(), OffsetSpec.latest()))
        return {place: Offsets(first[place], end[place]) for place in places}

    def _list(self, places: Sequence[tuple[str, int]], spec: Any) -> Mapping[tuple[str, int], int]:
        asked = {TopicPartition(*place): spec for place in places}
        try:
            futures = self._admin.list_offsets(
                asked, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=CALL_SECONDS
            )
            return {
                (each.topic, each.partition): future.result(CALL_SECONDS).offset for each, future in futures.items()
            }
        except (KafkaException, TimeoutError) as error:
            raise self._problem(error) from error

    def _report(self, error: KafkaError) -> None:
        self._reported[error.code()] = error

    def _problem(self, error: Exception) -> CorantoError:
        """Return the error of a failed call. Its cause is not in `error`, but was reported by the connections."""
        while self._admin.poll(0):
            pass
        reported, self._reported = self._reported, {}
        refused = [each for code, each in reported.items() if code in _REFUSED]
        causes = [each for code, each in reported.items() if code != KafkaError._ALL_BROKERS_DOWN]
        if refused or causes:
            return problem_of(KafkaException((refused or causes)[-1]))
        return problem_of(error)


def client_options(
    options: KafkaOptions, defaults: Mapping[str, object] = _NONE, own: Mapping[str, object] = _NONE
) -> dict[str, object]:
    """Return the options of Kafka's client: `defaults`, the options of the file, and `own`, in this order."""
    return {
        "log_level": _CRITICAL,  # The errors of connections are in Coranto's log.
        **defaults,
        "client.id": "coranto-ingest",
        **options.client,
        "bootstrap.servers": options.brokers,
        **own,
    }


def problem_of(error: Exception) -> CorantoError:
    """Translate an error of Kafka's library: InvalidInput if a retry cannot help, otherwise Unavailable."""
    cause = error.args[0] if isinstance(error, KafkaException) and error.args else error
    if isinstance(error, ValueError | TypeError) or (isinstance(cause, KafkaError) and cause.code() in _REFUSED):
        return InvalidInput(f"Kafka refuses: {cause}", field="source.kafka")
    text = cause.str() if isinstance(cause, KafkaError) else str(cause) or type(cause).__name__
    return Unavailable(f"a call to Kafka failed: {text}")
