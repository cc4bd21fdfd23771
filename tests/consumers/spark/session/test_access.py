"""Tasks get tokens for their journals, never the keys."""

import base64
import os
import time

import pytest
from pyspark import cloudpickle

from coranto.client import ClientConfig
from coranto.security.tokens import BearerToken, Capability, Keys, Secret, verify
from coranto_consumers.spark.session.access import for_tasks, without_keys
from coranto_consumers.spark.source.data_source import JournalDataSource

KEY = os.urandom(32)
KEYS = Keys((Secret(KEY),))
CONFIG = ClientConfig("127.0.0.1:1", auth=KEYS)


def granted(config: ClientConfig):
    return verify(config.auth.bearer(None), KEYS, time.time())


def test_a_token_grants_one_capability_on_the_journals_for_a_while():
    claims = granted(for_tasks(CONFIG, Capability.READ, ["a/one", "a/two"], 60))

    assert claims.capability == Capability.READ
    assert claims.covers("a/one")
    assert claims.covers("a/two")
    assert not claims.covers("a/three")
    assert claims.exp <= time.time() + 60


@pytest.mark.parametrize(
    ("names", "others"),
    [
        ([f"shop/orders/part-{n:05}" for n in range(1000)], ["shop/else", "other/orders"]),
        ([f"shop/{n:05}/orders" for n in range(1000)], ["other/orders"]),
        ([f"{n:05}/orders" for n in range(1000)], []),
    ],
)
def test_a_token_for_many_journals_grants_their_folders(names, others):
    config = for_tasks(CONFIG, Capability.READ, names)
    claims = granted(config)

    assert all(map(claims.covers, names))
    assert not any(map(claims.covers, others))
    assert claims.capability == Capability.READ
    assert len(config.auth.token.reveal()) < 6000, "gRPC accepts 8 KiB of metadata"


def test_tokens_signed_by_others_are_forwarded():
    token = ClientConfig("127.0.0.1:1", auth=BearerToken(Secret("abc")))
    assert for_tasks(token, Capability.READ, ["a"]) is token
    assert without_keys(token) is token
    assert without_keys(CONFIG).auth is None
    assert for_tasks(ClientConfig("127.0.0.1:1"), Capability.READ, ["a"]).auth is None


def test_a_reader_sent_to_executors_holds_no_keys(broker):
    for name in ("a/one", "a/two"):
        broker.create(name)
        broker.write(name, b"{}\n")
    options = {"endpoint": broker.endpoint, "selector": "name:prefix=a/", "authSecret": base64.b64encode(KEY).decode()}
    options["minPartitions"] = "2"
    source = JournalDataSource(options)
    reader = source.reader(source.schema())
    partitions = reader.partitions()

    sent = cloudpickle.dumps((reader, partitions))
    assert KEY not in sent
    assert base64.b64encode(KEY) not in sent
    for partition in partitions:
        [part] = partition.parts
        claims = granted(partition.client)
        assert [name for name in ("a/one", "a/two") if claims.covers(name)] == [part.range.journal]
        assert claims.capability == Capability.READ
    rows = [row for each in partitions for batch in cloudpickle.loads(sent)[0].read(each) for row in batch.to_pylist()]
    assert len(rows) == 2
