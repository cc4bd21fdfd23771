"""Signed manifests (`coranto.security.documents`), and files of manifests."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from coranto.errors import InvalidInput, Unauthenticated
from coranto.lake.manifest import Manifest
from coranto.security.documents import DocumentKind, environment_keys, sign_document, verify_document
from coranto.security.tokens import Keys

MANIFEST: Final = DocumentKind("coranto-manifest", "manifest", "coranto journals manifest --sign")


def sign_manifest(manifest: Manifest, keys: Keys) -> str:
    """Sign a manifest with the first key, and return the signed text."""
    return sign_document(MANIFEST, manifest.to_json().encode(), keys)


def verify_manifest(signed: str, keys: Keys) -> Manifest:
    """Verify a signed text, and return its manifest.

    Raises Unauthenticated if none of the keys signed it or if it was changed, and InvalidInput for any other text.
    """
    return Manifest.from_json(verify_document(MANIFEST, signed, keys))


def load_manifest(path: Path | str, keys: Keys | None = None) -> Manifest:
    """Return the manifest in a file: JSON, or a signed one, which is verified.

    With `keys` the file must be signed with one of them. Without, a signed file is verified with the keys of
    $CORANTO_AUTH_KEYS. Raises InvalidInput if the file does not exist or has no manifest, and Unauthenticated if its
    signature is invalid, or missing although `keys` are given.
    """
    try:
        text = Path(path).read_text().strip()
    except (FileNotFoundError, IsADirectoryError):
        raise InvalidInput(f"there is no file {path}; write one with `{MANIFEST.command}`", field="manifest") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"{path} is not text", field="manifest") from None
    if not text.startswith("{"):
        return verify_manifest(text, keys or environment_keys(MANIFEST))
    if keys is not None:
        raise Unauthenticated(f"{path} is not signed, and keys are given: write it with `{MANIFEST.command}`")
    return Manifest.from_json(text)
