"""Clients of journals: asynchronous, blocking, and batching."""

from coranto.client.append.appender import Appender
from coranto.client.append.service import Appended, AppendService
from coranto.client.client import JournalClient
from coranto.client.config import ClientConfig
from coranto.client.moments import Moment
from coranto.client.sync import SyncAppender, SyncAppendService, SyncJournalClient
from coranto.client.values import (
    AppendConditions,
    AppendResult,
    Chunk,
    FragmentInfo,
    JournalInfo,
    Listing,
    Suspend,
)
from coranto.security.tls import ClientTls

__all__ = [
    "AppendConditions",
    "AppendResult",
    "AppendService",
    "Appended",
    "Appender",
    "Chunk",
    "ClientConfig",
    "ClientTls",
    "FragmentInfo",
    "JournalClient",
    "JournalInfo",
    "Listing",
    "Moment",
    "Suspend",
    "SyncAppendService",
    "SyncAppender",
    "SyncJournalClient",
]
