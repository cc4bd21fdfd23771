"""`coranto journals edit`: opens the specs of journals in an editor, repeatedly until they can be applied."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from coranto.cli.connect import Endpoint, with_client
from coranto.cli.journals.selection import Names, Selector, chosen, select
from coranto.cli.output import note
from coranto.cli.reconciling import ApplyOptions, MaxTxnSize, reconcile
from coranto.client import JournalClient
from coranto.errors import CorantoError, InvalidInput
from coranto.reconcile import JOURNALS, JournalSpecs
from coranto.specs.journal_tree import parse_tree, render_tree

_HEAD = "# Edit the specs of journals, and save. Journals that are left out stay as they are; `delete: true` deletes.\n"
_ERROR = "# ERROR: "


def edit(
    names: Names = None, selector: Selector = None, max_txn_size: MaxTxnSize = 0, endpoint: Endpoint = None
) -> None:
    """Edit the specs of journals in $CORANTO_EDITOR, $EDITOR or vi, and apply the saved text.

    If the saved text cannot be applied, the editor opens again with the reason on top. Nothing happens if the text is
    unchanged or empty.
    """
    selection = chosen(names, selector)
    found = with_client(endpoint, lambda client: select(client, selection))
    options = ApplyOptions(max_txn_size=max_txn_size, quiet_if_unchanged=True)

    def apply_saved(saved: str) -> None:
        changes = parse_tree(saved)

        async def work(client: JournalClient) -> None:
            await reconcile(JOURNALS, JournalSpecs(client), changes, "the edit", options)

        with_client(endpoint, work)

    text = render_tree([(info.spec, info.mod_revision) for info in found])
    edit_until_applied(_HEAD + text, apply_saved, "coranto-journals-")


def edit_until_applied(opened: str, apply_saved: Callable[[str], None], prefix: str) -> None:
    """Open a text in an editor and apply it; after a failure, open it again with the error on top, until it succeeds.

    `prefix` begins the name of the file. Raises InvalidInput if the user makes no change after a failure.
    """
    path = _create(opened, prefix)
    keep = False
    reason = ""
    try:
        while True:
            _run_editor(path)
            saved = _without_error(path.read_text(encoding="utf-8", errors="replace"))
            if not _has_content(saved):
                keep = False
                note("nothing was applied, because nothing was left")
                return
            if saved == _without_error(opened):
                if keep:
                    raise InvalidInput(f"nothing was applied: {reason}; the saved text is kept in {path}")
                note("nothing was changed")
                return
            keep = True
            try:
                apply_saved(saved)
            except CorantoError as error:
                reason = str(error)
                opened = "".join(f"{_ERROR}{line}\n" for line in _lines_of(error)) + saved
                path.write_text(opened, encoding="utf-8")
            else:
                keep = False
                return
    finally:
        if not keep:
            path.unlink(missing_ok=True)


def _create(text: str, prefix: str) -> Path:
    descriptor, name = tempfile.mkstemp(prefix=prefix, suffix=".yaml")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    return Path(name)


def _run_editor(path: Path) -> None:
    editor = os.environ.get("CORANTO_EDITOR") or os.environ.get("EDITOR") or "vi"
    try:
        code = subprocess.run([*shlex.split(editor), str(path)], check=False).returncode
    except ValueError as error:
        raise InvalidInput(f"the editor {editor!r} is not a command: {error}. Set $CORANTO_EDITOR.") from error
    except OSError as error:
        raise InvalidInput(f"cannot start the editor {editor!r}: {error.strerror}. Set $CORANTO_EDITOR.") from error
    if code:
        raise InvalidInput(
            f"the editor {editor!r} ended with exit code {code}; nothing was applied. Edit again, "
            "and leave the editor without an error"
        )


def _lines_of(error: CorantoError) -> list[str]:
    return str(error).splitlines() or [type(error).__name__]


def _without_error(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith(_ERROR))


def _has_content(text: str) -> bool:
    return any(line.strip() and not line.lstrip().startswith("#") for line in text.splitlines())
