"""The library's version, which is the version of the distribution `coranto`."""

from __future__ import annotations

from importlib.metadata import version

__version__ = version("coranto")
