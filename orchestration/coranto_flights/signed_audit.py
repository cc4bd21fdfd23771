"""The audit at the end of the main job: all journals and both consumers, in one signed report.

The report and its key stay in the demo's folder, so that it can be verified later (`coranto audit verify`).
"""

from __future__ import annotations

import asyncio
import base64
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from coranto.audit import AuditOptions, Depth, Report, audit_journals
from coranto.audit.signing import sign_report, verify_report
from coranto.client import ClientConfig, JournalClient
from coranto.fragments.stores import StoreRegistry
from coranto.security.tokens import Keys
from coranto_consumers.audit import ConsumerCheck, SqlEvidence, parse_expectation
from coranto_consumers.stores.sql import SqlStore
from coranto_flights.proof import CheckedClaim

REPORT: Final = "audit.jwt"
KEY: Final = "audit.key"
_SHOWN = 3


def audit_and_sign(
    config: ClientConfig, store_url: str, tables: Mapping[str, str], data_dir: Path, *, selector: str = ""
) -> CheckedClaim:
    """Audit all content of journals, and consumers by a replay of their sources. Sign and store the report.

    `tables` has the table of each consumer, by the consumer's name. Raises only when the cluster or the store does not
    answer.
    """
    report = asyncio.run(_audit(config, store_url, tables, selector))
    keys = Keys.parse(_key(data_dir / KEY))
    path = data_dir / REPORT
    path.write_text(f"{sign_report(report, keys)}\n")
    kept = verify_report(path.read_text(), keys)
    claim = "a signed audit of all journals and both consumers finds nothing wrong"
    if kept.sound:
        return CheckedClaim(claim, True, kept.summary)
    return CheckedClaim(claim, False, "; ".join(str(finding) for finding in kept.errors[:_SHOWN]))


async def _audit(config: ClientConfig, store_url: str, tables: Mapping[str, str], selector: str) -> Report:
    async with JournalClient.of(config) as client:
        evidence = SqlEvidence(SqlStore(store_url))
        consumers = [
            ConsumerCheck(
                consumer,
                client,
                evidence,
                expectations=[parse_expectation(f"SELECT SUM(flights) FROM {table} == messages")],
            )
            for consumer, table in tables.items()
        ]
        options = AuditOptions(Depth.DEEP, None)
        return await audit_journals(client, StoreRegistry(config.file_root), selector, options, checks=consumers)


def _key(path: Path) -> str:
    """Return the key of the demo's reports. The first audit creates it, readable only by its owner."""
    if not path.exists():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(base64.b64encode(secrets.token_bytes(32)).decode())
    return path.read_text()
