"""Tests below `elsewhere` take minutes: they make environments and clusters as users do. `make test-install` runs them.

That command fails if it collects no test, so they cannot be left out by mistake.
"""

import os

collect_ignore = [] if os.environ.get("CORANTO_TEST_INSTALL") else ["elsewhere"]
