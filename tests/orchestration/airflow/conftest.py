"""Tests below `installed` need Airflow, which has its own environment: `make test-airflow` runs them there.

That command fails if it collects no test, so they cannot be skipped by mistake.
"""

from importlib.util import find_spec

collect_ignore = [] if find_spec("airflow") else ["installed"]
