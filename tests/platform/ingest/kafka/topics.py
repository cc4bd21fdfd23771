"""Topics of a real Kafka, and their producers."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from confluent_kafka import KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from coranto.ingest.kafka.options import KafkaOptions

SECONDS = 60.0
_numbers = itertools.count()


def delivered(error: Any, _: Any) -> None:
    """Raise the error of a record that was not written. `flush` calls this."""
    if error is not None:
        raise KafkaException(error)


class Topics:
    """The topics of a test, and a producer for them."""

    def __init__(self, address: str, client: dict[str, str] | None = None) -> None:
        self.address = address
        self.client = client or {}
        self.admin = AdminClient(self.settings())
        self.producer = self._producer()

    def settings(self, **more: Any) -> dict[str, Any]:
        """Return the settings of a client."""
        given = {name.replace("_", "."): value for name, value in more.items()}
        return {"bootstrap.servers": self.address, "log_level": 2, **self.client, **given}

    def _producer(self) -> Producer:
        # Without idempotence, a repeated batch arrives after later ones.
        return Producer(self.settings(linger_ms=5, enable_idempotence=True))

    def new(self, partitions: int = 1, **config: str) -> str:
        """Create a topic with a unique name."""
        name = f"orders-{os.getpid()}-{next(_numbers)}"
        self.create(name, partitions, **config)
        return name

    def create(self, name: str, partitions: int = 1, **config: str) -> None:
        settings = {key.replace("_", "."): value for key, value in config.items()}
        for future in self.admin.create_topics([NewTopic(name, partitions, 1, config=settings)]).values():
            future.result(SECONDS)

    def delete(self, name: str) -> None:
        for future in self.admin.delete_topics([name]).values():
            future.result(SECONDS)

    def add_partitions(self, name: str, count: int) -> None:
        for future in self.admin.create_partitions([NewPartitions(name, count)]).values():
            future.result(SECONDS)
        deadline = time.monotonic() + SECONDS
        while len(self.admin.list_topics(name, timeout=SECONDS).topics[name].partitions) < count:
            assert time.monotonic() < deadline
        self.producer = self._producer()  # The previous producer may know only the old partitions.

    def remove_before(self, name: str, partition: int, offset: int) -> None:
        for future in self.admin.delete_records([TopicPartition(name, partition, offset)]).values():
            future.result(SECONDS)

    def write(self, name: str, numbers: Iterable[int], partition: int = 0, **more: Any) -> None:
        """Write records `{"n": …}` with one of five keys."""
        for number in numbers:
            self.producer.produce(
                name,
                json.dumps({"n": number}).encode(),
                f"key-{number % 5}".encode(),
                partition=partition,
                on_delivery=delivered,
                **more,
            )
        assert self.producer.flush(SECONDS) == 0

    def put(self, name: str, value: bytes | None, key: bytes | None = None, partition: int = 0, **more: Any) -> None:
        self.producer.produce(name, value, key, partition=partition, on_delivery=delivered, **more)
        assert self.producer.flush(SECONDS) == 0

    def transaction(
        self,
        name: str,
        numbers: Iterable[int],
        *,
        commits: bool | None,
        partition: int = 0,
        row: Callable[[int], Mapping[str, Any]] = lambda number: {"n": number},
    ) -> Producer:
        """Write a transaction, and commit it, abort it, or leave it open (None)."""
        producer = Producer(self.settings(transactional_id=f"test-{os.getpid()}-{next(_numbers)}"))
        producer.init_transactions(SECONDS)
        producer.begin_transaction()
        for number in numbers:
            producer.produce(name, json.dumps(row(number)).encode(), f"key-{number % 5}".encode(), partition=partition)
        producer.flush(SECONDS)
        if commits is True:
            producer.commit_transaction(SECONDS)
        elif commits is False:
            producer.abort_transaction(SECONDS)
        return producer

    def options(self, *names: str, **changes: Any) -> KafkaOptions:
        given: dict[str, Any] = {"poll_seconds": 0.2, "client": self.client}
        return KafkaOptions(self.address, names, **given | changes)
