"""Examines the environment of a user or an operator: what of it would not work, and what to do about it.

Each module examines one thing and returns results; none changes anything but the probe's own file in a store.
"""

from coranto.checkup.results import Condition, Examination

__all__ = ["Condition", "Examination"]
