"""Storage locations of the memory of consumers' audits."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.errors import CorantoError
from coranto.fragments.stores import StoreRegistry
from coranto_consumers.audit.places import file_name, memory_at

names = st.text(max_size=200)


@given(names, names)
def test_each_consumer_has_its_own_file_with_a_safe_name(one: str, other: str) -> None:
    assert (file_name(one) == file_name(other)) is (one == other)
    assert file_name(one).isascii()
    assert not set(file_name(one)) & set("/\\ :*?\0")
    assert len(file_name(one)) < 128


@pytest.mark.parametrize("kind", ["folder", "store"])
async def test_load_returns_the_last_saved_content(kind: str, tmp_path: Path) -> None:
    place = str(tmp_path / "memory") if kind == "folder" else "file:///memory/"
    memory = memory_at(place, StoreRegistry(file_root=tmp_path))
    assert await memory.load("shop/sums") is None
    for content in (b"first", b"second"):
        await memory.save("shop/sums", content)
        assert await memory.load("shop/sums") == content
    assert await memory.load("shop/other") is None
    if kind == "folder":
        assert [path.name for path in (tmp_path / "memory").iterdir()] == [file_name("shop/sums")]


async def test_an_unusable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    memory = memory_at(str(tmp_path / "file"), StoreRegistry())
    with pytest.raises(CorantoError, match=f"the folder {tmp_path / 'file'} of earlier audits cannot be used"):
        await memory.save("shop/sums", b"content")
