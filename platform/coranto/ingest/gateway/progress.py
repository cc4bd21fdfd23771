"""The progress of webhooks: the keys of the window, and the last committed request of each gateway."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from coranto.errors import CorruptData
from coranto.ingest.progress import IngestProgress
from coranto.ingest.source import Position
from coranto.ingest.webhook.keys import DeduplicationWindow, decode, encode

GATEWAY_SECONDS: Final = 86400.0
"""The time to remember a gateway that commits nothing, unless the window of keys is longer."""


@dataclass(slots=True)
class WebhookProgress(IngestProgress):
    """The progress of webhooks. A split is a gateway; its position has the number and the time of its last request.

    `keys` are all known keys. `new` has the packed keys of the last batch, which was decided at `at`. `seconds` is the
    length of the window.
    """

    keys: DeduplicationWindow = field(default_factory=lambda: DeduplicationWindow(0.0))
    at: float = 0.0
    new: bytes = b""
    seconds: float = 0.0

    def number_of(self, gateway: str) -> int:
        """Return the number of a gateway's last committed request; 0 if there is none."""
        return int(self.splits.get(gateway, (0,))[0])

    def _fields(self, splits: Mapping[str, Position], *, is_complete: bool) -> dict[str, object]:
        new = [(self.at, self.new)] if self.new else []
        if is_complete:
            oldest = self.at - max(self.seconds, GATEWAY_SECONDS)
            splits = self.splits = {name: each for name, each in splits.items() if each[1] >= oldest}
            self.keys.expire(self.at)
            new = [*self.keys.batches(), *new]
        # `super()` without arguments fails in a dataclass with slots.
        fields = IngestProgress._fields(self, splits, is_complete=is_complete)
        return {**fields, "keys": encode(new)}

    def apply(self, record: Mapping[str, Any]) -> None:
        IngestProgress.apply(self, record)
        try:
            keys = decode(record["keys"])
        except KeyError as error:
            raise CorruptData("a record of the progress of webhooks has no keys: another ingest wrote it") from error
        if record["complete"]:
            self.keys.clear()
        for at, packed in keys:
            self.keys.add(at, packed)
