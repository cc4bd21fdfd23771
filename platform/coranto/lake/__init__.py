"""Journals as tables: manifests of stored fragments, and typed scans of them for Polars, DuckDB and Arrow.

`make_manifest` lists the fragments of journals, complete for the content that it names. `scan` reads the committed
messages of a manifest, each once. Scans need the `lake` extra, or pyarrow and numpy alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coranto.lake.manifest import JournalPart, ListedFragment, Manifest
from coranto.lake.signing import load_manifest, sign_manifest, verify_manifest
from coranto.lazy import lazy_names

if TYPE_CHECKING:
    from coranto.lake.listing import make_manifest as make_manifest
    from coranto.lake.scanning import Scan as Scan
    from coranto.lake.scanning import ScanMisfits as ScanMisfits
    from coranto.lake.scanning import scan as scan

__all__ = [
    "JournalPart",
    "ListedFragment",
    "Manifest",
    "Scan",
    "ScanMisfits",
    "load_manifest",
    "make_manifest",
    "scan",
    "sign_manifest",
    "verify_manifest",
]

# A client without the extra has no pyarrow, and commands should start quickly.
__getattr__ = lazy_names(
    __name__,
    {
        "ScanMisfits": "coranto.lake.scanning",
        "Scan": "coranto.lake.scanning",
        "make_manifest": "coranto.lake.listing",
        "scan": "coranto.lake.scanning",
    },
)
