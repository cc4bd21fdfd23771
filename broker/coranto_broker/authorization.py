"""Who may call what of a broker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from coranto.security.admission import UNRESTRICTED, Authorizer, TokenExpired
from coranto.security.tokens import Capability

__all__ = ["RULES", "UNRESTRICTED", "Authorizer", "TokenExpired"]

RULES: Final[Mapping[str, Capability]] = {
    "List": Capability.LIST,
    "Apply": Capability.APPLY,
    "Read": Capability.READ,
    "Append": Capability.APPEND,
    "Replicate": Capability.REPLICATE,
    "ListFragments": Capability.READ,
    "FragmentStoreHealth": Capability.READ,
}
"""What each method of `protocol.Journal` takes. One that is not here cannot be served."""
