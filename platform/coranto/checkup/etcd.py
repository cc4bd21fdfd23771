"""Examine etcd: its answers, version, alarms, database size, compaction and clock."""

from __future__ import annotations

import base64
import dataclasses
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

from coranto.checkup.clock import clock_result
from coranto.checkup.results import Examination, absent, good, problem, warning
from coranto.cluster.etcd_program import (
    BINARY_VARIABLE,
    CONSEQUENCE,
    GOOD_VERSIONS,
    INSTALL,
    find_etcd,
    is_good,
    parse_version,
)
from coranto.cluster.etcd_server import ask_etcd
from coranto.errors import ClusterError, CorantoError
from coranto.security.tls import ClientTls

OLDEST: Final = (3, 4)
MAX_KEPT_REVISIONS: Final = 1_000_000
FEW_REVISIONS: Final = 10_000
"""An etcd with at most this many revisions may not have compacted anything yet."""
_FULL: Final = 0.8
_QUOTA: Final = 2 << 30
"""etcd's default quota of its database, in bytes. The configured quota cannot be queried."""
_SECONDS: Final = 5.0
_LEADERLESS: Final = "see etcd's log: is there a leader?"
_ADVICE: Final = {
    "NOSPACE": "etcd's database has reached its quota, and etcd accepts no change of a key until the alarm is off: "
    "compact its history (`etcdctl compact REVISION`), `etcdctl defrag`, then `etcdctl alarm disarm`; or first raise "
    "--quota-backend-bytes",
    "CORRUPT": "the members of etcd differ: replace this member, then `etcdctl alarm disarm`",
}


def etcd(endpoints: str, tls: ClientTls | None = None) -> list[Examination]:
    """Examine the etcd at an endpoint: `host:port`, or `https://host:port`; or each of several, separated by commas."""
    several = [each.strip() for each in endpoints.split(",") if each.strip()]
    if not several:
        return [problem("etcd", f"{endpoints!r} names no endpoint", "give --etcd host:port")]
    if len(several) == 1:
        return _member(several[0], tls)
    return [
        dataclasses.replace(each, subject=f"{each.subject} ({endpoint})")
        for endpoint in several
        for each in _member(endpoint, tls)
    ]


def program(environment: Mapping[str, str] = os.environ) -> Examination:
    """Examine the program that embedded clusters would start as their etcd."""
    subject = "etcd of embedded clusters"
    try:
        found = find_etcd(environment)
    except ClusterError as error:
        if environment.get(BINARY_VARIABLE):
            return problem(subject, str(error), f"correct ${BINARY_VARIABLE}")
        return absent(subject, "not installed; only `coranto up` and embedded clusters need it", INSTALL)
    return good(subject, str(found)) if found.is_good else warning(subject, f"{found}: {CONSEQUENCE}", INSTALL)


def _member(endpoint: str, tls: ClientTls | None) -> list[Examination]:
    try:
        results = [_version(str(_ask(endpoint, tls, "/version").get("etcdserver", "")))]
    except (OSError, ValueError, CorantoError) as error:
        advice = "start etcd, or correct --etcd; for https give the certificates in $CORANTO_ETCD_CA, _CERT and _KEY"
        return [problem("etcd", f"{endpoint} does not answer: {error}", advice)]
    unhealthy = _health(endpoint, tls)
    try:
        alarms = _alarms(endpoint, tls)
        if unhealthy and not alarms:
            return [*results, problem("etcd's health", unhealthy, _LEADERLESS)]
        results += [*alarms, _examine_free_space(endpoint, tls), _compaction(endpoint, tls), _clock(endpoint, tls)]
    except (OSError, ValueError, KeyError) as error:
        if unhealthy:
            return [*results, problem("etcd's health", f"{unhealthy}; {error}", _LEADERLESS)]
        advice = "let this user read etcd's status; etcd 3.4 or newer answers these questions over HTTP"
        results.append(warning("etcd's state", f"cannot be read: {error}", advice))
    return results


def _health(endpoint: str, tls: ClientTls | None) -> str:
    """Return the reason why etcd is not healthy; empty if it is. With an active alarm, it is not."""
    try:
        answer = _ask(endpoint, tls, "/health")
    except (OSError, ValueError) as error:  # It answers with the status 503.
        return str(error)
    return "" if answer.get("health") == "true" else "etcd says that it is not healthy"


def _ask(
    endpoint: str, tls: ClientTls | None, path: str, question: dict[str, object] | None = None
) -> dict[str, object]:
    return ask_etcd(endpoint, tls, path, question, _SECONDS)


def _version(text: str) -> Examination:
    version = parse_version(text)
    if version is None:
        return problem("etcd's version", f"{text!r} is not a version", "is this an etcd? Correct --etcd")
    if version[:2] < OLDEST:
        return problem("etcd's version", text, "Coranto needs etcd 3.4 or newer: upgrade it")
    if not is_good(version):
        advice = f"upgrade it, since {CONSEQUENCE}, or let its members differ. Good versions are {GOOD_VERSIONS}"
        return warning("etcd's version", text, advice)
    return good("etcd's version", text)


def _alarms(endpoint: str, tls: ClientTls | None) -> list[Examination]:
    alarms = _ask(endpoint, tls, "/v3/maintenance/alarm", {"action": "GET"}).get("alarms") or []
    if not isinstance(alarms, list):
        raise ValueError("etcd's alarms are not a list")
    kinds = sorted({str(each.get("alarm", "?")) for each in alarms})
    return [problem("etcd's alarms", f"{each} is active", _ADVICE.get(each, "see etcd's log")) for each in kinds]


def _examine_free_space(endpoint: str, tls: ClientTls | None) -> Examination:
    size = int(str(_ask(endpoint, tls, "/v3/maintenance/status", {}).get("dbSize", 0)))
    if size > _FULL * _QUOTA:
        advice = "compact and defragment etcd, or raise --quota-backend-bytes: at its quota etcd accepts no change"
        return warning("etcd's size", f"{size >> 20} MiB", advice)
    return good("etcd's size", f"{size >> 10} KiB")


def _compaction(endpoint: str, tls: ClientTls | None) -> Examination:
    latest = int(str(_range(endpoint, tls, 0)["revision"]))
    low, high = 1, latest  # The first revision that can be read is in [low, high].
    while low < high:
        middle = (low + high) // 2
        if _is_kept(endpoint, tls, middle):
            high = middle
        else:
            low = middle + 1
    kept = latest - low + 1
    found = f"{kept} of {latest} revisions are kept"
    never = low == 1 and latest > FEW_REVISIONS
    if never or kept > MAX_KEPT_REVISIONS:
        advice = "start etcd with --auto-compaction-mode=periodic --auto-compaction-retention=10m"
        return warning("etcd's compaction", f"{found}; " + ("none was ever compacted" if never else "too many"), advice)
    return good("etcd's compaction", found)


def _range(endpoint: str, tls: ClientTls | None, revision: int) -> dict[str, object]:
    question: dict[str, object] = {"key": base64.b64encode(b"coranto/doctor").decode(), "revision": str(revision)}
    header = _ask(endpoint, tls, "/v3/kv/range", question)["header"]
    if not isinstance(header, dict):
        raise ValueError("etcd answered without a header")
    return header


def _is_kept(endpoint: str, tls: ClientTls | None, revision: int) -> bool:
    try:
        _range(endpoint, tls, revision)
    except ValueError as error:
        if "compacted" in str(error):
            return False
        raise
    return True


def _clock(endpoint: str, tls: ClientTls | None) -> Examination:
    headers: dict[str, str] = {}
    before = datetime.now(UTC)
    ask_etcd(endpoint, tls, "/version", None, _SECONDS, headers)
    after = datetime.now(UTC)
    theirs = parsedate_to_datetime(headers["Date"])
    middle = before + (after - before) / 2
    # The header has whole seconds, rounded down.
    return clock_result("etcd", (theirs - middle).total_seconds() + 0.5, (after - before).total_seconds() / 2 + 0.5)
