"""Quotas: the rates and open streams that each caller may use of one broker.

A caller over a rate is delayed, in the order of its calls, until the rate allows the call. If that takes longer than
`delay_seconds`, the call is rejected, and nothing of it was applied. The content of a call that was admitted is paced
by further delays and is not rejected. The excess counts against the caller's next calls.

A caller is identified by the subject (`sub`) of its token, otherwise by `coranto.security.admission.caller_of`.
Calls between brokers have no quota: the broker that a client called has counted them.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import prometheus_client
import structlog
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coranto.effects import Clock
from coranto.errors import InvalidInput, LimitExceeded
from coranto.security.admission import UNRESTRICTED
from coranto.security.tokens import Capability, Claims
from coranto.wire import protocol_pb2 as pb
from coranto.wire.heads_pb2 import QuotaRejections
from coranto_broker.rpc.rolled_back import RolledBack
from coranto_broker.rpc.source import MessageSink

BURST_SECONDS: Final = 1.0
"""The burst that an idle caller may use without delay: its rate for this many seconds."""
LOG_SECONDS: Final = 1.0
REPORTED_SECONDS: Final = 3600.0
"""The time that a caller is reported to operators, after its last rejected call."""
_MAX_CALLERS: Final = 10_000
_MAX_REPORTED: Final = 100
_log = structlog.get_logger(__name__)

_Limit = Annotated[int, Field(ge=0)]


class QuotaExceeded(LimitExceeded):
    """A call was rejected because its caller exceeds a quota of this broker."""


class AppendQuotaExceeded(RolledBack, QuotaExceeded):
    """An append was rejected because its caller exceeds a quota of this broker. Nothing was appended."""


class Quota(BaseModel):
    """The limits of one caller at one broker; 0: no limit. Rates are per second."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    appends: _Limit = 0
    append_bytes: _Limit = 0
    read_bytes: _Limit = 0
    streams: _Limit = 0
    """The maximum number of open streams: of appends, blocking reads, and watches of listings."""
    etcd_bytes: _Limit | None = None
    """The maximum bytes written to etcd in 20 minutes; None: `etcd_caller_bytes`."""


class QuotaFile(BaseModel):
    """The content of a file of quotas."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    delay_seconds: Annotated[float, Field(ge=0, le=60)] = 1.0
    default: Quota = Quota()
    """The quota of each caller without its own."""
    callers: dict[str, Quota] = {}
    """The quotas by token subject."""

    @classmethod
    def read(cls, path: Path) -> QuotaFile:
        """Read a YAML file. Raises InvalidInput, which names the file and the key."""
        try:
            return cls.model_validate(yaml.safe_load(path.read_text()) or {})
        except OSError as error:
            raise InvalidInput(f"the file of quotas {path} cannot be read: {error.strerror or error}") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise InvalidInput(f"the file of quotas {path}: {where}: {first['msg']}") from error
        except (ValueError, yaml.YAMLError) as error:
            raise InvalidInput(f"the file of quotas {path} is not YAML: {error}") from error


class QuotaMetrics:
    """The counters of quotas."""

    def __init__(self, registry: prometheus_client.CollectorRegistry) -> None:
        self.delayed = prometheus_client.Counter(
            "coranto_quota_delays", "Calls and chunks that were delayed by a quota.", ["quota"], registry=registry
        )
        self.rejected = prometheus_client.Counter(
            "coranto_quota_rejections", "Calls that were rejected by a quota.", ["quota"], registry=registry
        )
        for quota in ("appends", "append_bytes", "read_bytes"):
            self.delayed.labels(quota)
            self.rejected.labels(quota)
        self.rejected.labels("streams")


class Quotas:
    """The usage of one broker, by caller. The caller "" has no quota."""

    def __init__(self, file: QuotaFile | None, clock: Clock, metrics: QuotaMetrics, etcd_caller_bytes: int = 0) -> None:
        """Without a `file` there is no quota. `etcd_caller_bytes` is for callers whose quota does not set it."""
        self._is_on = file is not None
        file = file or QuotaFile()
        self._default, self._delay_seconds = file.default, file.delay_seconds
        self._callers = {Claims(Capability(0), subject=name).identity: quota for name, quota in file.callers.items()}
        self._etcd_caller_bytes = etcd_caller_bytes
        self._clock = clock
        self._metrics = metrics
        # By caller and quota: the monotonic time when the rate has paid for all use. Least recently used first.
        self._paid_at: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._open: Counter[str] = Counter()
        # By caller and quota, least recently rejected first.
        self._rejections: OrderedDict[tuple[str, str], QuotaRejections] = OrderedDict()
        self._logged_at = -math.inf
        self._unlogged = 0

    def apply_to(self, claims: Claims) -> bool:
        """Return True if calls with these claims are subject to quotas."""
        return self._is_on and (claims is UNRESTRICTED or Capability.REPLICATE not in claims.capability)

    def rejections(self) -> list[QuotaRejections]:
        """Return the callers whose calls were rejected in the last hour, at most 100, the latest first."""
        earliest = self._clock.now() - REPORTED_SECONDS
        return [each for each in reversed(self._rejections.values()) if each.last_time >= earliest]

    def etcd_bytes(self, caller: str) -> int:
        """Return the bytes that a caller may write to etcd in 20 minutes; 0: no limit."""
        limit = self._of(caller).etcd_bytes
        return self._etcd_caller_bytes if limit is None else limit

    def report_etcd_bytes(self, caller: str) -> None:
        """Report a caller whose change was refused because it has written too much to etcd."""
        self._report(caller, "etcd_bytes")

    async def admit_appends(self, caller: str, count: int = 1, size: int = 0) -> None:
        """Count appends with `size` bytes, and delay them if needed. Raises AppendQuotaExceeded, counting nothing."""
        if caller:
            costs = {"appends": count, "append_bytes": size}
            if (problem := self._problem(caller, costs)) is not None:
                raise AppendQuotaExceeded(f"{problem} Nothing was appended")
            await self._use(caller, costs)

    async def admit_read(self, caller: str) -> None:
        """Admit a read, after a delay if needed. Raises QuotaExceeded."""
        if caller:
            if (problem := self._problem(caller, {"read_bytes": 0})) is not None:
                raise QuotaExceeded(problem)
            await self._use(caller, {"read_bytes": 0})

    async def pace_append(self, caller: str, size: int) -> None:
        """Count content of an admitted append, and delay it if needed."""
        if caller and size:
            await self._use(caller, {"append_bytes": size})

    def paced(self, sink: MessageSink, caller: str) -> MessageSink:
        """Return a sink for a read's responses that counts their content, and delays it if needed."""
        return _PacedSink(self, sink, caller) if caller else sink

    def count(self, caller: str, append_bytes: int) -> None:
        """Count content of an admitted append without a delay, because it is in memory already."""
        if caller and append_bytes:
            self._add(caller, "append_bytes", append_bytes)

    @contextlib.contextmanager
    def stream(self, caller: str) -> Iterator[None]:
        """Count an open stream during the block. At the caller's limit, raise QuotaExceeded instead."""
        limit = self._of(caller).streams if caller else 0
        if not limit:
            yield
            return
        if self._open[caller] >= limit:
            self._note_rejection(caller, "streams")
            raise QuotaExceeded(
                f"{caller} has {limit} open streams at this broker, and its quota (streams) allows no more. End some, "
                "or try again later"
            )
        self._open[caller] += 1
        try:
            yield
        finally:
            self._open[caller] -= 1
            if not self._open[caller]:
                del self._open[caller]

    def _of(self, caller: str) -> Quota:
        return self._callers.get(caller, self._default)

    def _wait(self, caller: str, name: str) -> float:
        """Return the seconds until a caller's rate has paid for all of its use."""
        if not getattr(self._of(caller), name):
            return 0.0
        return max(0.0, self._paid_at.get((caller, name), 0.0) - self._clock.monotonic())

    def _problem(self, caller: str, costs: dict[str, int]) -> str | None:
        """Return the reason to reject a call, or None."""
        for name in costs:
            seconds = self._wait(caller, name)
            if seconds > self._delay_seconds:
                self._note_rejection(caller, name)
                limit = getattr(self._of(caller), name)
                return (
                    f"{caller} exceeds its quota of {limit} {name.replace('_', ' ')} per second at this broker, and "
                    f"would wait {seconds:.1f} s, longer than {self._delay_seconds:g} s. Slow down, and try again "
                    "later, or have an operator raise the quota."
                )
        return None

    async def pace_read(self, caller: str, size: int) -> None:
        """Count content for an admitted read, and delay it if needed."""
        if size:
            await self._use(caller, {"read_bytes": size})

    async def _use(self, caller: str, costs: dict[str, int]) -> None:
        seconds = 0.0
        for name, cost in costs.items():
            wait = self._wait(caller, name)
            if wait > 0:
                self._metrics.delayed.labels(name).inc()
            seconds = max(seconds, wait)
            self._add(caller, name, cost)
        if seconds > 0:
            await self._clock.sleep(seconds)

    def _add(self, caller: str, name: str, cost: int) -> None:
        rate = getattr(self._of(caller), name)
        if not rate or not cost:
            return
        key, earliest = (caller, name), self._clock.monotonic() - BURST_SECONDS
        self._paid_at[key] = max(self._paid_at.get(key, earliest), earliest) + cost / rate
        self._paid_at.move_to_end(key)
        if len(self._paid_at) > _MAX_CALLERS:
            self._paid_at.popitem(last=False)

    def _note_rejection(self, caller: str, quota: str) -> None:
        self._metrics.rejected.labels(quota).inc()
        self._report(caller, quota)
        self._unlogged += 1
        now = self._clock.monotonic()
        if now - self._logged_at >= LOG_SECONDS:
            _log.warning("quota.calls_rejected", caller=caller, quota=quota, rejected=self._unlogged)
            self._logged_at, self._unlogged = now, 0

    def _report(self, caller: str, quota: str) -> None:
        found = self._rejections.setdefault((caller, quota), QuotaRejections(caller=caller, quota=quota))
        found.calls, found.last_time = found.calls + 1, self._clock.now()
        self._rejections.move_to_end((caller, quota))
        if len(self._rejections) > _MAX_REPORTED:
            self._rejections.popitem(last=False)


class _PacedSink:
    """The sink of a read whose caller has a quota."""

    def __init__(self, quotas: Quotas, sink: MessageSink, caller: str) -> None:
        self._quotas = quotas
        self._sink = sink
        self._caller = caller

    async def write(self, message: pb.ReadResponse, /) -> None:
        """Send a response, delayed as the quota demands."""
        await self._quotas.pace_read(self._caller, len(message.content))
        await self._sink.write(message)
