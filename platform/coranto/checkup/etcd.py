"""Examines etcd: its answers, its version, the compaction of its history, its room and its clock."""

from __future__ import annotations

import base64
import dataclasses
import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

from coranto.checkup.clock import clock_result
from coranto.checkup.results import Examination, good, problem, warning
from coranto.cluster.etcd_server import ask_etcd
from coranto.errors import CorantoError
from coranto.security.tls import ClientTls

OLDEST: Final = (3, 4)
UNSOUND: Final = ((3, 5, 0), (3, 5, 1), (3, 5, 2))
MOST_KEPT_REVISIONS: Final = 1_000_000
FEW_REVISIONS: Final = 10_000
"""A young etcd may not have compacted anything yet."""
_FULL: Final = 0.8
_QUOTA: Final = 2 << 30
"""etcd's default limit of its database, in bytes. Its own limit cannot be asked for."""
_SECONDS: Final = 5.0


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


def _member(endpoint: str, tls: ClientTls | None) -> list[Examination]:
    try:
        version = str(_ask(endpoint, tls, "/version").get("etcdserver", ""))
        healthy = _ask(endpoint, tls, "/health").get("health") == "true"
    except (OSError, ValueError, CorantoError) as error:
        advice = "start etcd, or correct --etcd; for https give the certificates in $CORANTO_ETCD_CA, _CERT and _KEY"
        return [problem("etcd", f"{endpoint} does not answer: {error}", advice)]
    results = [_version(version)]
    if not healthy:
        return [
            *results,
            problem("etcd's health", "etcd says that it is not healthy", "see etcd's log: is there a leader?"),
        ]
    try:
        results += [*_room(endpoint, tls), _compaction(endpoint, tls), _clock(endpoint, tls)]
    except (OSError, ValueError, KeyError) as error:
        advice = "let this user read etcd's status; etcd 3.4 or newer answers these questions over HTTP"
        results.append(warning("etcd's state", f"cannot be read: {error}", advice))
    return results


def _ask(
    endpoint: str, tls: ClientTls | None, path: str, question: dict[str, object] | None = None
) -> dict[str, object]:
    return ask_etcd(endpoint, tls, path, question, _SECONDS)


def _version(text: str) -> Examination:
    found = re.match(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})", text)
    if found is None:
        return problem("etcd's version", f"{text!r} is no version", "is this an etcd? Correct --etcd")
    version = (int(found[1]), int(found[2]), int(found[3]))
    if version[:2] < OLDEST:
        return problem("etcd's version", text, "Coranto needs etcd 3.4 or newer: upgrade it")
    if version in UNSOUND:
        advice = (
            "upgrade for production: 3.5.0 to 3.5.2 can become inconsistent after a crash (`coranto up` brings 3.5.1)"
        )
        return warning("etcd's version", text, advice)
    return good("etcd's version", text)


def _room(endpoint: str, tls: ClientTls | None) -> list[Examination]:
    status = _ask(endpoint, tls, "/v3/maintenance/status", {})
    alarms = _ask(endpoint, tls, "/v3/maintenance/alarm", {"action": "GET"}).get("alarms") or []
    size = int(str(status.get("dbSize", 0)))
    results = []
    if isinstance(alarms, list) and alarms:
        kinds = ", ".join(sorted({str(each.get("alarm", "?")) for each in alarms}))
        advice = "NOSPACE: compact, `etcdctl defrag`, `etcdctl alarm disarm`; CORRUPT: replace the member"
        results.append(problem("etcd's alarms", kinds, advice))
    if size > _FULL * _QUOTA:
        advice = "compact and defragment etcd, or raise --quota-backend-bytes: at its quota etcd accepts no change"
        results.append(warning("etcd's size", f"{size >> 20} MiB", advice))
    else:
        results.append(good("etcd's size", f"{size >> 10} KiB"))
    return results


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
    if never or kept > MOST_KEPT_REVISIONS:
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
    # The header has whole seconds, cut off.
    return clock_result("etcd", (theirs - middle).total_seconds() + 0.5, (after - before).total_seconds() / 2 + 0.5)
