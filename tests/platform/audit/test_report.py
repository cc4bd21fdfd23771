"""Reports of audits: their JSON, their order, and their signatures."""

from __future__ import annotations

import base64
import json

import jwt
import pytest

from coranto.audit.check import Result, run_checks
from coranto.audit.findings import Finding, Kind, Severity, Subject
from coranto.audit.report import Coverage, Depth, Report
from coranto.audit.signing import sign_report, verify_report
from coranto.errors import InvalidInput, Unauthenticated
from coranto.security.tokens import Capability, Claims, Keys, sign

KEYS = Keys.parse(base64.b64encode(b"k" * 32).decode())
OTHERS = Keys.parse(base64.b64encode(b"o" * 32).decode())

LOST = Finding(
    Kind.CONTENT_LOST,
    Severity.ERROR,
    Subject.journal("a/b"),
    "[0, 10) is gone",
    {"spans": [[0, 10]], "retention_seconds": 0.5, "stores": ["file:///"], "known": True, "other": None},
    since=12.5,
)
OLD = Finding(Kind.UNPERSISTED_TOO_OLD, Severity.WARNING, Subject.journal("a/a"), "waits for 90 s")
FIRST = Finding(Kind.FIRST_AUDIT, Severity.INFO, Subject.journal("a/a"), "nothing is known from before")


class Gives:
    """A check with a fixed result."""

    def __init__(self, name: str, result: Result) -> None:
        self.name = name
        self._result = result

    async def run(self) -> Result:
        return self._result


async def report_of(*findings: Finding) -> Report:
    coverage = [Coverage("content", "bytes", 5, 7, "the budget is 5 bytes")]
    one = Gives("one", Result(list(findings), {"a/a": {"head": 3}}, coverage, "c1"))
    two = Gives("two", Result([], {"a/a": {"begin": 0}, "a/b": {"head": 10}}))
    return await run_checks("name:prefix=a/", [one, two], depth=Depth.DEEP)


async def test_a_report_survives_its_json() -> None:
    report = await report_of(FIRST, OLD, LOST)
    assert Report.from_json(report.to_json()) == report
    assert Report.from_json(report.to_json(indent=2).encode()) == report


async def test_the_gravest_findings_come_first_and_subjects_join_the_facts_of_all_checks() -> None:
    report = await report_of(FIRST, OLD, LOST)
    assert list(report.findings) == [LOST, OLD, FIRST]
    assert report.subjects == {"a/a": {"head": 3, "begin": 0}, "a/b": {"head": 10}}
    assert report.kinds() == {Kind.CONTENT_LOST, Kind.UNPERSISTED_TOO_OLD, Kind.FIRST_AUDIT}
    assert report.of(Subject.journal("a/b")) == [LOST]
    assert not report.sound
    assert report.summary == "NOT sound: 1 error, 1 warning, 1 info; 2 examined"


async def test_only_errors_make_a_report_unsound() -> None:
    assert (await report_of(OLD, FIRST)).sound
    assert (await report_of()).summary == "sound: 2 examined"
    joined = (await report_of()).joined(await report_of(LOST))
    assert not joined.sound


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 2}, "has format 2"),
        ({"depth": "bottomless"}, "depth"),
        ({"findings": [{"kind": "unheard_of"}]}, "findings.0"),
        ({"subjects": 7}, "subjects"),
    ],
)
async def test_a_report_of_a_later_version_is_refused(change: dict[str, object], says: str) -> None:
    content = json.loads((await report_of(LOST)).to_json()) | change
    with pytest.raises(InvalidInput, match=says):
        Report.from_json(json.dumps(content))


@pytest.mark.parametrize("text", ["", "nothing", "[]", "{}", "null"])
def test_other_text_is_no_report(text: str) -> None:
    with pytest.raises(InvalidInput, match="not a report"):
        Report.from_json(text)


async def test_a_signed_report_is_verified_with_any_of_the_keys() -> None:
    report = await report_of(LOST)
    signed = sign_report(report, KEYS)
    assert verify_report(f"  {signed}\n", Keys((*OTHERS.secrets, *KEYS.secrets))) == report


async def test_a_changed_report_is_refused() -> None:
    header, payload, signature = sign_report(await report_of(LOST), KEYS).split(".")
    content = json.loads(base64.urlsafe_b64decode(payload + "=="))
    content["findings"] = []
    changed = base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")
    with pytest.raises(Unauthenticated, match="changed after it was signed"):
        verify_report(f"{header}.{changed}.{signature}", KEYS)


async def test_a_report_that_somebody_else_signed_is_refused() -> None:
    with pytest.raises(Unauthenticated, match="key that is not among"):
        verify_report(sign_report(await report_of(), OTHERS), KEYS)


async def test_an_unsigned_report_is_refused() -> None:
    payload = (await report_of()).to_json().encode()
    unsigned = jwt.PyJWS(algorithms=["none"]).encode(payload, None, algorithm="none", headers={"typ": "coranto-audit"})
    with pytest.raises(Unauthenticated, match="cannot be verified"):
        verify_report(unsigned, KEYS)


async def test_a_token_is_no_report_and_other_text_neither() -> None:
    with pytest.raises(InvalidInput, match="type 'JWT'"):
        verify_report(sign(Claims(Capability.ALL, iat=0, exp=1), KEYS), KEYS)
    for text in ("", "a.b.c", (await report_of()).to_json()):
        with pytest.raises(InvalidInput, match="not a signed report"):
            verify_report(text, KEYS)
