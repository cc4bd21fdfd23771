"""Authorization of calls to a consumer."""

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
"""The capability that each method of `consumer.Shard` requires. A method that is missing here is not served."""
