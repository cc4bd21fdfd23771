"""Run pytest, and run each failed test a second time, alone.

A test that passes the second time is printed as `flaky: NAME` and does not fail the run. The run fails if a test fails
twice, if more than `MAX_FLAKY` tests fail, or if pytest fails for another reason.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

MAX_FLAKY = 3
TESTS_FAILED = 1
"""Pytest's exit code after a complete run with failed tests."""


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="coranto-tests-") as folder:
        cache = Path(folder)
        code = _pytest([*arguments, "-o", f"cache_dir={cache}"])
        if code != TESTS_FAILED:
            return code
        record = cache / "v" / "cache" / "lastfailed"
        failed = sorted(json.loads(record.read_text())) if record.exists() else []
        if not failed or len(failed) > MAX_FLAKY:
            print(f"{len(failed)} tests failed; at most {MAX_FLAKY} are repeated", flush=True)
            return code
        again = [name for name in failed if _pytest([name, "-o", f"cache_dir={cache}", "-p", "no:xdist"])]
    for name in failed:
        print(f"{'failed twice' if name in again else 'flaky'}: {name}", flush=True)
    return TESTS_FAILED if again else 0


def _pytest(arguments: list[str]) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
