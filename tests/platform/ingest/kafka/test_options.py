"""The options of topics, and errors with the line and without secrets."""

from __future__ import annotations

import pytest

from coranto.errors import InvalidInput
from coranto.ingest.kafka.options import KafkaOptions
from coranto.ingest.spec import read_spec

KAFKA = """
name: orders
stream: shop/orders
source:
  kafka:
    brokers: ${BROKERS}
    topics: [orders, returns]
    value: avro
    registry: {url: "http://registry", basic.auth.user.info: "${USER_INFO}"}
    start: latest
    meta: [offset, key]
    tombstones: skip
    operation: op
    lost: continue
    recreated: restart
    look: 1m
    options: {security.protocol: SASL_SSL, sasl.password: "a${PASSWORD}b"}
"""
ENVIRONMENT = {"BROKERS": "k:9092", "USER_INFO": "u:p", "PASSWORD": "geheim"}


def test_kafka_with_environment_variables() -> None:
    assert read_spec(KAFKA, ENVIRONMENT).options == KafkaOptions(
        "k:9092",
        ("orders", "returns"),
        "avro",
        {"url": "http://registry", "basic.auth.user.info": "u:p"},
        True,
        ("offset", "key"),
        False,
        True,
        True,
        60.0,
        "op",
        {"security.protocol": "SASL_SSL", "sasl.password": "ageheimb"},
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("topics: [orders, returns]", "topics: []"), "give one topic or more, each once"),
        (("topics: [orders, returns]", "topics: [a/b]"), "'a/b' is not a name of a topic"),
        (("value: avro", "value: json"), "values are json: leave the registry out"),
        (("url:", "uri:"), "values are avro: give the registry that has their schemas"),
        (("security.protocol: SASL_SSL", "isolation.level: x"), "the option isolation.level is set by the ingest"),
        (("[offset, key]", "[offset, place]"), "meta has 'place'"),
    ],
)
def test_errors_contain_the_line_and_no_secret(change: tuple[str, str], problem: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        read_spec(KAFKA.replace(*change), ENVIRONMENT)
    assert problem in str(raised.value)
    assert "line " in str(raised.value)
    assert "geheim" not in str(raised.value)
