"""Errors of Kafka's library: temporary and permanent ones."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException

from coranto.cluster.processes import free_port
from coranto.errors import InvalidInput, Unavailable
from coranto.ingest.kafka.cluster import KafkaCluster, client_options, problem_of
from coranto.ingest.kafka.options import KafkaOptions

OPTIONS = KafkaOptions(
    "k:9092", ("t",), client={"sasl.password": "geheim", "client.id": "mine", "fetch.min.bytes": "2"}
)


def test_client_options_override_defaults_but_not_required_values() -> None:
    found = client_options(OPTIONS, {"fetch.min.bytes": 1, "linger": 1}, {"client.id": "own"})
    assert found == {
        "log_level": 2,
        "fetch.min.bytes": "2",
        "linger": 1,
        "sasl.password": "geheim",
        "client.id": "own",
        "bootstrap.servers": "k:9092",
    }


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KafkaException(KafkaError(KafkaError._TRANSPORT)), Unavailable),
        (KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE)), Unavailable),
        (KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)), InvalidInput),
        (KafkaException(KafkaError(KafkaError._AUTHENTICATION)), InvalidInput),
        (TimeoutError(), Unavailable),
        (RuntimeError("Consumer closed"), Unavailable),
        (ValueError("no such option"), InvalidInput),
    ],
)
def test_temporary_and_permanent_errors_are_distinguished(error: Exception, kind: type[Exception]) -> None:
    assert type(problem_of(error)) is kind


def test_unknown_client_options_are_refused_without_their_values() -> None:
    wrong = KafkaOptions("k:9092", ("t",), client={"sasl.pasword": "geheim"})
    with pytest.raises(InvalidInput, match=r"Kafka refuses.*sasl\.pasword") as raised:
        KafkaCluster(wrong)
    assert "geheim" not in str(raised.value)


def test_the_error_contains_the_reason_of_the_connections(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("coranto.ingest.kafka.cluster.CALL_SECONDS", 1.0)
    with pytest.raises(Unavailable, match=r"Connect to .* failed: Connection refused"):
        KafkaCluster(KafkaOptions(f"127.0.0.1:{free_port()}", ("t",))).id()
    assert "FAIL" not in capfd.readouterr().err
