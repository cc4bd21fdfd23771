"""Journals as a message queue of the provider common-messaging: `MessageQueueTrigger(scheme="journal", group=…)`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow.providers.common.messaging.providers.base_provider import BaseMessageQueueProvider

if TYPE_CHECKING:
    from airflow.triggers.base import BaseEventTrigger


class JournalMessageQueueProvider(BaseMessageQueueProvider):
    """Queue provider that creates a JournalOffsetTrigger from all arguments except the scheme."""

    scheme = "journal"

    def trigger_class(self) -> type[BaseEventTrigger]:
        from airflow_coranto.triggers.journal import JournalOffsetTrigger

        return JournalOffsetTrigger
