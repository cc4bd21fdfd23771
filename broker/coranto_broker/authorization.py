"""The capability that each RPC method of a broker requires."""

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
    "AppendStream": Capability.APPEND,
    "Replicate": Capability.REPLICATE,
    "ListFragments": Capability.READ,
    "FragmentStoreHealth": Capability.READ,
    "Heads": Capability.READ,
    "Note": Capability.NOTE,
}
"""The capability that each method of `protocol.Journal`, `coranto.Journals` and `coranto.Appends` requires.

A method without an entry cannot be served.
"""
