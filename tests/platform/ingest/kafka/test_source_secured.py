"""Kafka with TLS and passwords: options reach its client, and wrong ones end the run with the reason."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from benchmarks.kafka import KafkaServer, fetched
from coranto.client import JournalClient
from coranto.errors import InvalidInput, Unavailable
from coranto.ingest.kafka.options import KafkaOptions
from coranto.ingest.kafka.source import KafkaSource
from coranto.ingest.spec import read_spec
from tests.platform.ingest.kafka.topics import Topics
from tests.platform.ingest.lists import events, ingest, spec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

LOGIN = (
    "org.apache.kafka.common.security.plain.PlainLoginModule required "
    'username="ada" password="geheim" user_ada="geheim";'
)
SPEC = """
name: loads
stream: shop/orders
source:
  kafka:
    brokers: {address}
    topics: [{topic}]
    options:
      security.protocol: SASL_SSL
      sasl.mechanism: PLAIN
      sasl.username: ada
      sasl.password: "${{KAFKA_PASSWORD}}"
      ssl.ca.location: {ca}
create: {{stores: ["file:///fragments/"]}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate, its key and the authority."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA(key_type=trustme.KeyType.RSA)
    issued = authority.issue_cert("127.0.0.1", "localhost", key_type=trustme.KeyType.RSA)
    key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "server.pem").write_bytes(key + b"".join(each.bytes() for each in issued.cert_chain_pems))
    (folder / "ca.pem").write_bytes(authority.cert_pem.bytes())
    trustme.CA().cert_pem.write_to_path(folder / "other.pem")
    return folder


@pytest.fixture(scope="module")
def secured(folder: Path) -> Iterator[KafkaServer]:
    properties = {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(folder / "server.pem"),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(folder / "ca.pem"),
        "sasl.enabled.mechanisms": "PLAIN",
        "sasl.mechanism.inter.broker.protocol": "PLAIN",
        "listener.name.clients.plain.sasl.jaas.config": LOGIN,
    }
    with KafkaServer(fetched(), partitions=1, protocol="SASL_SSL", properties=properties) as server:
        yield server


def options(folder: Path) -> dict[str, str]:
    return {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "ada",
        "sasl.password": "geheim",
        "ssl.ca.location": str(folder / "ca.pem"),
    }


async def test_options_of_the_file_reach_the_client(secured: KafkaServer, folder: Path, client: JournalClient) -> None:
    topics = Topics(secured.address, options(folder))
    topic = topics.new()
    topics.write(topic, range(3))
    text = SPEC.format(address=secured.address, topic=topic, ca=folder / "ca.pem")
    given = read_spec(text, {"KAFKA_PASSWORD": "geheim"})
    assert (await ingest(client, KafkaSource(given.options), given=given).run()).rows == 3
    assert sorted(each["n"] for each in await events(client)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "value", "kind", "reason"),
    [
        ("sasl.password", "wrong", InvalidInput, "Kafka refuses: .*Authentication failed"),
        ("sasl.mechanism", "SCRAM-SHA-256", InvalidInput, "Kafka refuses: .*mechanism"),
        ("ssl.ca.location", "other.pem", Unavailable, "certificate verify failed"),
        ("security.protocol", "SASL_PLAINTEXT", Unavailable, "a call to Kafka failed: "),
        ("security.protocol", "SSH", InvalidInput, "Kafka refuses: .*security.protocol"),
        ("sasl.mechanism", "PLANE", InvalidInput, "Kafka refuses: .*PLANE"),
    ],
)
async def test_wrong_options_give_the_reason(
    secured: KafkaServer,
    folder: Path,
    client: JournalClient,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    kind: type[Exception],
    reason: str,
) -> None:
    monkeypatch.setattr("coranto.ingest.kafka.cluster.CALL_SECONDS", 3.0)
    changed = options(folder) | {name: str(folder / value) if value.endswith(".pem") else value}
    given = KafkaOptions(secured.address, ("orders",), client=changed)
    async with asyncio.timeout(60):
        with pytest.raises(kind, match=reason) as raised:
            await ingest(client, KafkaSource(given), given=spec(kind="kafka")).run()
    assert "geheim" not in str(raised.value)
