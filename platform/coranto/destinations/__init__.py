"""The dlt destination `coranto`: tables become journals, and each file of a load is published once.

dlt looks for a destination `coranto` in a package of this name, because the distribution has an entry point in the
group `dlt`. The entry point imports only this file, and nothing of dlt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coranto.lazy import lazy_names

if TYPE_CHECKING:
    from coranto.destinations.factory import coranto

__getattr__ = lazy_names(__name__, {"coranto": "coranto.destinations.factory"})

__all__ = ["coranto"]
