"""File stores, and stores on an S3 server over HTTP, satisfy the contract of fragment stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from coranto.fragments.stores import FragmentStore, open_store
from coranto.testing.contracts.fragment_store import FragmentStoreContract
from tests.servers.s3 import ANY_KEY, S3Server

BUCKET = "contract"


class TestFileStore(FragmentStoreContract):
    @pytest.fixture
    def store(self, file_root: Path) -> FragmentStore:
        return open_store("file:///fragments/", file_root=file_root)


class TestS3Store(FragmentStoreContract):
    @pytest.fixture
    def store(self, s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FragmentStore:
        for name, value in ANY_KEY.environment.items():
            monkeypatch.setenv(name, value)
        return open_store(s3_server.store_url(BUCKET, f"{tmp_path.name}/"))
