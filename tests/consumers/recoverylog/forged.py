"""Forged histories for tests."""

from __future__ import annotations

from coranto.messages.fixed_frame import encode_frame
from coranto_consumers.recoverylog import Author, RecordedOperation
from coranto_consumers.recoverylog.lineage import HistoryPosition
from coranto_consumers.recoverylog.operations import Change, Write

LOG = "recovery/logs/one"
FORGER = Author(0xBAD)


def forged(*changes: Change, chain: HistoryPosition = HistoryPosition(1, 0)) -> bytes:
    """Return a history from its beginning, as any client that may append can write it."""
    content = []
    for change in changes:
        payload = RecordedOperation(chain.seq_no, chain.checksum, FORGER, change).to_payload()
        content.append(encode_frame(payload) + (b"x" * change.length if isinstance(change, Write) else b""))
        chain = chain.after(payload)
    return b"".join(content)
