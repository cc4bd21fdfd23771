"""Histories are drawn at random here; how long one takes says nothing, least of all on a busy machine."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
