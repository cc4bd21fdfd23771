"""Signed reports: a JWT (HS256) whose content is the report, so that nobody can change a report unnoticed.

The keys are those of the cluster (`coranto.security.tokens.Keys`). A report is no token: its header says
`typ: coranto-audit`, and only such JWTs are accepted here. Brokers in turn refuse a report as a token, because it lacks
the claims of one.
"""

from __future__ import annotations

from typing import Final

import jwt

from coranto.audit.report import Report
from coranto.errors import InvalidInput, Unauthenticated
from coranto.security.tokens import Keys

TYPE: Final = "coranto-audit"
_ALGORITHM: Final = "HS256"
_jws = jwt.PyJWS(algorithms=[_ALGORITHM], options={"enforce_minimum_key_length": True})


def sign_report(report: Report, keys: Keys) -> str:
    """Return the report, signed with the first key."""
    return _jws.encode(report.to_json().encode(), keys.secrets[0].reveal(), algorithm=_ALGORITHM, headers={"typ": TYPE})


def verify_report(signed: str, keys: Keys) -> Report:
    """Return the report of a signed text.

    Raises Unauthenticated if none of the keys signed it or if it was changed, and InvalidInput if it is no report.
    """
    text = signed.strip()
    try:
        kind = _jws.get_unverified_header(text).get("typ")
    except (jwt.PyJWTError, ValueError):
        raise InvalidInput(
            "is not a signed report: expected what `coranto audit --sign` wrote", field="report"
        ) from None
    if kind != TYPE:
        raise InvalidInput(f"is a JWT of type {kind!r}, not a signed report of an audit ({TYPE})", field="report")
    for secret in keys.secrets:
        try:
            payload = _jws.decode(text, secret.reveal(), algorithms=[_ALGORITHM])
        except (jwt.InvalidSignatureError, jwt.InvalidKeyError):
            continue
        except (jwt.PyJWTError, ValueError) as error:
            raise Unauthenticated(f"the report's signature cannot be verified: {type(error).__name__}") from None
        return Report.from_json(payload)
    raise Unauthenticated(
        "the report was changed after it was signed, or it was signed with a key that is not among the given ones "
        "($CORANTO_AUTH_KEYS)"
    )
