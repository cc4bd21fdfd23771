"""Forks of journals: journals that share the stored fragments of another journal up to an offset, and diverge there."""

from __future__ import annotations

from coranto.forks.creating import fork_journal, fork_journals
from coranto.forks.dropping import drop_fork, drop_forks, forks_of
from coranto.fragments.forks import Fork, fork_of

__all__ = ["Fork", "drop_fork", "drop_forks", "fork_journal", "fork_journals", "fork_of", "forks_of"]
