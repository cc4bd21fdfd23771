"""Quotas: rates and open streams of each caller, tested directly and at a broker with several clients."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from coranto import labels
from coranto.checkup.results import Condition
from coranto.checkup.status.brokers import ask_brokers
from coranto.client import JournalClient
from coranto.client.config import ClientConfig
from coranto.effects import SystemClock
from coranto.errors import InvalidInput, Unavailable
from coranto.security.admission import UNRESTRICTED, caller_of
from coranto.security.tokens import BearerToken, Capability, Claims, Keys, sign
from coranto.wire import protocol_pb2 as pb
from coranto_broker.handlers.errors import code_of
from coranto_broker.http.statuses import http_status
from coranto_broker.quotas import (
    REPORTED_SECONDS,
    AppendQuotaExceeded,
    Quota,
    QuotaExceeded,
    QuotaFile,
    QuotaMetrics,
    Quotas,
)
from coranto_broker.server.process import BrokerProcess
from coranto_broker.settings import BrokerSettings
from tests.broker.handlers.test_authorization import KEY
from tests.broker.running import eventually, running_broker
from tests.platform.member.clock import ManualClock
from tests.spans import recorded_spans

J = "test/journal"
MakeSpec = Callable[..., pb.JournalSpec]
ALICE = caller_of(Claims(Capability.APPEND, subject="alice"), "")
BOB = caller_of(Claims(Capability.APPEND, subject="bob"), "")


class Setting:
    def __init__(self, file: QuotaFile | None) -> None:
        self.registry, self.clock = CollectorRegistry(), ManualClock()
        self.quotas = Quotas(file, self.clock, QuotaMetrics(self.registry), etcd_caller_bytes=7)

    def count(self, kind: str, quota: str) -> float | None:
        return self.registry.get_sample_value(f"coranto_quota_{kind}_total", {"quota": quota})

    def seconds(self, count: int, size: int = 0, caller: str = ALICE) -> float:
        before = self.clock.monotonic()
        asyncio.run(self.quotas.admit_appends(caller, count, size))
        return self.clock.monotonic() - before


def test_a_rate_allows_a_burst_then_delays_and_then_rejects() -> None:
    setting = Setting(QuotaFile(delay_seconds=2, default=Quota(appends=10)))
    assert setting.seconds(10) == 0
    assert setting.seconds(30) == 0  # Later calls pay for its excess.
    with pytest.raises(AppendQuotaExceeded, match=r"alice exceeds its quota of 10 appends per second.*wait 3\.0 s"):
        setting.seconds(1)
    assert setting.seconds(10, caller=BOB) == 0
    setting.clock.advance(1.5)
    assert setting.seconds(1) == pytest.approx(1.5)
    assert setting.seconds(1) == pytest.approx(0.1)
    assert (setting.count("delays", "appends"), setting.count("rejections", "appends")) == (2, 1)
    setting.clock.advance(60)
    assert setting.seconds(10) == 0  # Unused time is not kept beyond the burst.
    assert setting.seconds(1) == 0
    assert setting.seconds(1) == pytest.approx(0.1)


def test_a_rejected_call_uses_nothing() -> None:
    setting = Setting(QuotaFile(delay_seconds=0, default=Quota(append_bytes=100)))
    assert setting.seconds(1, 150) == 0
    for _ in range(5):
        with pytest.raises(AppendQuotaExceeded):
            setting.seconds(1, 1_000)
    setting.clock.advance(0.5)
    assert setting.seconds(1, 1) == 0


def test_large_content_is_paced_and_never_rejected() -> None:
    setting = Setting(QuotaFile(delay_seconds=0.1, default=Quota(append_bytes=100, read_bytes=50)))
    before = setting.clock.monotonic()

    async def send() -> None:
        for _ in range(10):
            await setting.quotas.pace_append(ALICE, 100)
            await setting.quotas.pace_read(ALICE, 100)

    asyncio.run(send())
    assert setting.clock.monotonic() - before >= 10
    with pytest.raises(QuotaExceeded, match="50 read bytes per second"):
        asyncio.run(setting.quotas.admit_read(ALICE))


def test_open_streams_are_counted_by_caller() -> None:
    setting = Setting(QuotaFile(callers={"alice": Quota(streams=1)}))
    with setting.quotas.stream(ALICE), setting.quotas.stream(BOB), setting.quotas.stream(BOB):
        with pytest.raises(QuotaExceeded, match="alice has 1 open streams"), setting.quotas.stream(ALICE):
            pass
    with setting.quotas.stream(ALICE):
        pass
    assert setting.count("rejections", "streams") == 1


def test_brokers_and_callers_without_quota_are_never_delayed() -> None:
    on, off = Setting(QuotaFile()), Setting(None)
    broker, client = Claims(Capability.APPEND | Capability.REPLICATE), Claims(Capability.APPEND)
    assert [on.quotas.apply_to(claims) for claims in (broker, client, UNRESTRICTED)] == [False, True, True]
    assert not off.quotas.apply_to(client)
    assert on.seconds(10**6, 10**9) == on.seconds(1) == 0


def test_a_quota_may_replace_the_limit_of_writes_to_etcd() -> None:
    quotas = Setting(QuotaFile(callers={"alice": Quota(etcd_bytes=100)})).quotas
    assert (quotas.etcd_bytes(ALICE), quotas.etcd_bytes(BOB)) == (100, 7)


def test_statuses() -> None:
    append, read = AppendQuotaExceeded("x"), QuotaExceeded("x")
    assert [code_of(append).name, code_of(read).name] == ["ABORTED", "RESOURCE_EXHAUSTED"]
    assert [http_status(append), http_status(read)] == [429, 429]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("default: {appends: -1}", r"default\.appends: Input should be greater than or equal to 0"),
        ("callers: {alice: {apends: 1}}", r"callers\.alice\.apends: Extra inputs are not permitted"),
        ("- 1", r"the file: Input should be a valid dictionary"),
        ("a: [", "is not YAML"),
        ("\x00", "is not YAML"),
    ],
)
def test_a_bad_file_is_refused_with_its_key(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "quotas.yaml"
    file.write_text(text)
    with pytest.raises(InvalidInput, match=problem) as refused:
        QuotaFile.read(file)
    assert str(file) in str(refused.value)
    with pytest.raises(InvalidInput, match="cannot be read: No such file"):
        QuotaFile.read(tmp_path / "missing.yaml")


@asynccontextmanager
async def limited(
    settings: BrokerSettings, tmp_path: Path, spec: pb.JournalSpec, quotas: str
) -> AsyncIterator[BrokerProcess]:
    """Run a broker with a file of quotas and tokens, and the journal J with one byte."""
    file = tmp_path / "quotas.yaml"
    file.write_text(quotas)
    settings = settings.model_copy(update={"auth_keys": SecretStr(KEY), "quotas": file, "http_port": 0})
    async with running_broker(settings) as (process, _):
        async with named(process, "admin") as admin:
            await admin.apply([pb.ApplyRequest.Change(upsert=spec, expect_mod_revision=-1)])
            await admin.append(J, b"x")
        yield process


def named(process: BrokerProcess, name: str, *, streams: bool = True, seconds: float = 30.0) -> JournalClient:
    return JournalClient.of(
        ClientConfig(process.endpoint, auth=Keys.parse(KEY), name=name, append_streams=streams, retry_timeout=seconds)
    )


async def next_of(client: JournalClient) -> bytes:
    """Wait for the second byte of the journal."""
    return b"".join([chunk.content async for chunk in client.read(J, 1, end_offset=2, block=True)])


def rejections(process: BrokerProcess, quota: str) -> float:
    registry = process.broker.metrics.registry
    return registry.get_sample_value("coranto_quota_rejections_total", {"quota": quota}) or 0


@pytest.mark.parametrize("streams", [True, False])
async def test_a_client_over_its_quota_is_rejected_and_others_are_not(
    broker_settings: BrokerSettings, tmp_path: Path, spec: MakeSpec, streams: bool
) -> None:
    quotas = "{delay_seconds: 0.1, callers: {greedy: {appends: 5}}}"
    async with (
        limited(broker_settings, tmp_path, spec(J), quotas) as process,
        named(process, "greedy", streams=streams, seconds=0.0) as greedy,
        named(process, "modest", streams=streams) as modest,
    ):
        found = await asyncio.gather(*(greedy.append(J, b"g") for _ in range(100)), return_exceptions=True)
        errors = [each for each in found if isinstance(each, BaseException)]
        assert errors
        assert len(errors) < 100
        assert all(isinstance(each, Unavailable) for each in errors)
        assert "the bearer greedy exceeds its quota of 5 appends per second" in str(errors[0])
        await asyncio.gather(*(modest.append(J, b"m") for _ in range(100)))
        committed = 100 - len(errors)
        content = b"".join([chunk.content async for chunk in modest.read(J, 0)])
        assert (content.count(b"g"), content.count(b"m")) == (committed, 100)
        assert rejections(process, "appends") >= 1


async def test_operators_see_exceeded_quotas(broker_settings: BrokerSettings, tmp_path: Path, spec: MakeSpec) -> None:
    quotas = "{delay_seconds: 0, callers: {greedy: {appends: 5, etcd_bytes: 10}}}"
    async with (
        limited(broker_settings, tmp_path, spec(J), quotas) as process,
        named(process, "greedy", seconds=0.0) as greedy,
    ):
        operator = ClientConfig(process.endpoint, auth=Keys.parse(KEY), name="operator")
        assert await _warnings(operator) == []
        await asyncio.gather(*(greedy.append(J, b"g") for _ in range(100)), return_exceptions=True)
        with pytest.raises(Unavailable, match="its limit is 10 within 20 minutes"):
            await greedy.apply([pb.ApplyRequest.Change(upsert=spec("test/other"), expect_mod_revision=-1)])
        count = round(rejections(process, "appends"))
        written, appended = await _warnings(operator)
        assert written.startswith("the bearer greedy exceeded etcd_bytes: 1 calls rejected, the last one ")
        assert appended.startswith(f"the bearer greedy exceeded appends: {count} calls rejected, the last one ")
        now = SystemClock().now()
        scope = labels.label_selector(include=[("name", J)])
        token = sign(Claims(Capability.ALL, scope, now, now + 600, "tenant"), Keys.parse(KEY))
        assert await _warnings(ClientConfig(process.endpoint, auth=BearerToken.parse(token))) == []
        printed = await _status(process, tmp_path)
        [line] = [line for line in printed.splitlines() if "exceeded etcd_bytes" in line]
        assert f"quotas of {process.endpoint}" in line
        shown = json.loads(await _status(process, tmp_path, "--output", "json"))["examinations"]
        found = [each for each in shown if each["subject"] == f"quotas of {process.endpoint}"]
        assert [each["condition"] for each in found] == ["warning", "warning"]
        assert found[1]["found"].startswith(f"the bearer greedy exceeded appends: {count} calls rejected")
        assert "raise its quota" in found[1]["advice"]


async def _status(process: BrokerProcess, folder: Path, *words: str) -> str:
    """Return the output of `coranto status`, run by an operator."""
    variables = {"CORANTO_ENDPOINT": process.endpoint, "CORANTO_AUTH_KEYS": KEY, "XDG_STATE_HOME": str(folder)}
    command = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from coranto.cli import main; main()", "status", *words),
        env=os.environ | variables,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await command.communicate()
    return output.decode()


async def _warnings(config: ClientConfig) -> list[str]:
    """Return the warnings of `coranto status` about the broker."""
    [answer] = await ask_brokers(config, [config.endpoint], 30.0)
    return [each.found for each in answer.examinations if each.condition is Condition.WARNING]


def test_exceeded_quotas_are_reported_for_an_hour_and_in_bounded_memory() -> None:
    setting = Setting(QuotaFile(delay_seconds=0, default=Quota(streams=1)))

    def exceed(caller: str) -> None:
        with setting.quotas.stream(caller), pytest.raises(QuotaExceeded), setting.quotas.stream(caller):
            pass

    for number in range(200):
        exceed(f"caller {number}")
    exceed("caller 150")
    found = setting.quotas.rejections()
    assert [each.caller for each in found[:2]] == ["caller 150", "caller 199"]
    assert (found[0].calls, found[0].quota, len(found)) == (2, "streams", 100)
    setting.clock.advance(REPORTED_SECONDS + 1)
    assert setting.quotas.rejections() == []


async def test_a_client_over_its_quota_is_delayed_and_completes(
    broker_settings: BrokerSettings, tmp_path: Path, spec: MakeSpec
) -> None:
    quotas = "{delay_seconds: 0.1, default: {append_bytes: 4000000, read_bytes: 4000000}}"
    with recorded_spans() as spans:
        async with limited(broker_settings, tmp_path, spec(J), quotas) as process, named(process, "batch") as batch:
            await _use_much(process, batch)
    assert {span.kind.name for span in spans.named(f"read {J}")} == {"CLIENT", "SERVER"}


async def _use_much(process: BrokerProcess, batch: JournalClient) -> None:
    large = b"y" * 6_000_000  # Streamed, as it is larger than any buffer.
    await batch.append(J, large)
    await asyncio.gather(*(batch.append(J, b"z" * 100_000) for _ in range(10)))
    assert len(b"".join([chunk.content async for chunk in batch.read(J, 0)])) == 1 + len(large) + 1_000_000
    delays = process.broker.metrics.registry.get_sample_value
    assert delays("coranto_quota_delays_total", {"quota": "append_bytes"})
    assert delays("coranto_quota_delays_total", {"quota": "read_bytes"})


async def test_delayed_appends_leave_capacity_for_other_clients(
    broker_settings: BrokerSettings, tmp_path: Path, spec: MakeSpec
) -> None:
    settings = broker_settings.model_copy(update={"max_appends": 4})
    async with (
        limited(settings, tmp_path, spec(J), "{delay_seconds: 60, callers: {greedy: {appends: 1}}}") as process,
        named(process, "greedy", streams=False) as greedy,
        named(process, "modest", streams=False, seconds=0.0) as modest,
    ):
        waiting = [asyncio.ensure_future(greedy.append(J, b"g")) for _ in range(20)]
        registry = process.broker.metrics.registry
        labels = {"quota": "appends"}
        await eventually(lambda: (registry.get_sample_value("coranto_quota_delays_total", labels) or 0) >= 10)
        assert (await modest.append(J, b"m")).begin >= 1
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await eventually(lambda: registry.get_sample_value("coranto_calls", {"method": "Append"}) == 0)


async def test_open_streams_of_a_client_are_limited(
    broker_settings: BrokerSettings, tmp_path: Path, spec: MakeSpec
) -> None:
    async with (
        limited(broker_settings, tmp_path, spec(J), "{callers: {greedy: {streams: 2}}}") as process,
        named(process, "greedy") as greedy,
        named(process, "modest") as modest,
    ):
        waiting = [asyncio.ensure_future(next_of(greedy)) for _ in range(2)]
        await eventually(lambda: sum(process.broker.quotas._open.values()) == 2)
        waiting.append(asyncio.ensure_future(next_of(greedy)))  # Repeated by the client, as all blocking reads.
        await eventually(lambda: rejections(process, "streams") >= 1)
        waiting.append(asyncio.ensure_future(next_of(modest)))
        await eventually(lambda: sum(process.broker.quotas._open.values()) == 2)
        await modest.append(J, b"!")
        assert await asyncio.gather(*waiting) == [b"!"] * 4
        await eventually(lambda: not process.broker.quotas._open)


async def test_the_gateway_answers_429(broker_settings: BrokerSettings, tmp_path: Path, spec: MakeSpec) -> None:
    now = SystemClock().now()
    claims = Claims(Capability.APPEND | Capability.READ, pb.LabelSelector(), now, now + 600, "web")
    headers = {"Authorization": f"Bearer {sign(claims, Keys.parse(KEY))}"}
    async with (
        limited(broker_settings, tmp_path, spec(J), "{delay_seconds: 0, callers: {web: {appends: 1}}}") as process,
        aiohttp.ClientSession(headers=headers) as session,
    ):
        statuses = []
        for _ in range(4):
            async with session.put(f"{process.http_endpoint}/{J}", data=b"x") as answer:
                statuses.append(answer.status)
                last = answer.headers.get("Retry-After"), await answer.text()
        assert statuses[0] == 204
        assert statuses[-1] == 429
        assert last[0] == "1"
        assert "the bearer web exceeds its quota" in last[1]
