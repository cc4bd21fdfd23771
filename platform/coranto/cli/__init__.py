"""The `coranto` command."""

from coranto.cli.app import main

__all__ = ["main"]
