"""Certificate files for tests, and the authorities that issue them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import trustme

from coranto.client import ClientTls


class Files:
    """One process's certificate, its key, and the authorities that it trusts."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.ca, self.cert, self.key = (folder / name for name in ("ca.pem", "cert.pem", "key.pem"))

    def issue(self, issuer: trustme.CA, *trusted: trustme.CA) -> None:
        issued = issuer.issue_cert("127.0.0.1", "localhost", key_type=trustme.KeyType.ECDSA)
        # Written one by one, as renewal tools do: for a moment they do not match.
        issued.private_key_pem.write_to_path(self.key)
        self.cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        self.ca.write_bytes(b"".join(authority.cert_pem.bytes() for authority in trusted))

    @property
    def tls(self) -> ClientTls:
        return ClientTls(self.ca, self.cert, self.key)

    @property
    def settings(self) -> dict[str, Any]:
        return {"tls_cert": self.cert, "tls_key": self.key, "tls_client_ca": self.ca, "peer_ca": self.ca}


def authority() -> trustme.CA:
    return trustme.CA(key_type=trustme.KeyType.ECDSA)
