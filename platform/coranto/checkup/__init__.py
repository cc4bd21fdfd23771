"""Examine the environment of a user or an operator: problems and their remedies.

Each module examines one thing and returns results. None changes anything, except for files of their own probes.
"""

from coranto.checkup.results import Condition, Examination

__all__ = ["Condition", "Examination"]
