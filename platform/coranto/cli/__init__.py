"""The `coranto` command."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: see `coranto.cli.app`."""
    try:
        # Import only here: it takes a while, and Ctrl-C during the import must end the command as quietly as later.
        from coranto.cli.app import main as run
    except KeyboardInterrupt:
        return 130
    return run(arguments)


__all__ = ["main"]
