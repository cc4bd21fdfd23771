"""The `coranto` command."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: see `coranto.cli.app`."""
    try:
        # Import here: it is slow, and Ctrl-C during the import must end the command without a traceback, too.
        from coranto.cli.app import main as run
    except KeyboardInterrupt:
        return 130
    return run(arguments)


__all__ = ["main"]
