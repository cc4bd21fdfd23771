"""Examine a fragment store with the rights of this process: write, read, list, sign, remove."""

from __future__ import annotations

from pathlib import Path

from coranto.checkup.results import Examination, good, problem
from coranto.client.store_probe import probe, probe_delete
from coranto.errors import CorantoError, InvalidInput, StoreDenied
from coranto.fragments.stores import open_store


async def store(url: str, file_root: Path | None) -> Examination:
    """Examine the store of a URL. `file_root` is the root of `file:///` stores."""
    subject = f"store {url}"
    try:
        opened = open_store(url, file_root=file_root)
    except (InvalidInput, OSError) as error:
        return problem(subject, str(error), "correct the URL, and give its credentials in the environment")
    done = "nothing"
    try:
        await probe(opened)
        done = "write, read, list and sign"
        await probe_delete(opened, "")
    except StoreDenied as error:
        wanted = "remove (s3:DeleteObject)" if done != "nothing" else "put, get and list"
        return problem(subject, f"allowed: {done}. {error}", f"allow these credentials to {wanted}")
    except (CorantoError, OSError) as error:
        return problem(subject, f"works: {done}. {error}", "correct the address, the bucket's name or the credentials")
    return good(subject, f"{done} work, and so does remove")
