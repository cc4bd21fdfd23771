"""The library's version: that of the distribution it is part of."""

from __future__ import annotations

from importlib.metadata import version

__version__ = version("coranto")
