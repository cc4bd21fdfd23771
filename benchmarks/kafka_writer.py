"""Write the lines of files to partitions of a topic of Kafka, in transactions.

It needs the downloaded Kafka client on its path. Arguments: the server's address, the topic, the number of
transactions, and a file for each partition. A line may begin with the key of its record and a tab. Prints the time when
the first commit began.
"""

from __future__ import annotations

import itertools
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

_SECONDS = 120.0
_QUEUED = 100_000


def main(server: str, topic: str, count: str, *files: str) -> None:
    kafka: Any = import_module("confluent_kafka")
    producer = kafka.Producer(
        {
            "bootstrap.servers": server,
            "transactional.id": "bench",
            "compression.type": "zstd",  # As for fragments of journals.
            "linger.ms": 20,
            "queue.buffering.max.messages": 2 * _QUEUED,
        }
    )
    producer.init_transactions(_SECONDS)
    partitions = [Path(file).read_bytes().split(b"\n")[:-1] for file in files]
    transactions = int(count)
    for number in range(transactions):
        producer.begin_transaction()
        for partition, lines in enumerate(partitions):
            begin, end = (len(lines) * part // transactions for part in (number, number + 1))
            for line in itertools.islice(lines, begin, end):
                while len(producer) >= _QUEUED:
                    producer.poll(0.01)
                key, tab, value = line.rpartition(b"\t")
                producer.produce(topic, value, key if tab else None, partition=partition)
        producer.flush(_SECONDS)
        if not number:
            print(time.time())
        producer.commit_transaction(_SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
