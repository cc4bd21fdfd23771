"""Who may call what of a consumer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from coranto.security.tokens import Capability

RULES: Final[Mapping[str, Capability]] = {
    "Stat": Capability.READ,
    "List": Capability.LIST,
    "Apply": Capability.APPLY,
    "GetHints": Capability.READ,
    "Unassign": Capability.APPLY,
}
"""What each method of `consumer.Shard` takes. One that is not here cannot be served."""
