"""Manifests: lists of the stored fragments of journals, complete for the content that they name. Pure.

A manifest claims, for each of its journals, the content [begin, end): every byte of it is in a listed fragment.
`unstored` is the acknowledged content after `end` that is not stored yet. A manifest is a snapshot: its fragments never
change, so two reads of it give the same bytes, as long as retention keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pydantic

from coranto.errors import InvalidInput
from coranto.fragments.cover_set import CoverSet
from coranto.fragments.fragment import Codec, Fragment
from coranto.security.documents import parse_document

FORMAT: Final = 1
"""The version of the manifest's JSON. A reader refuses later ones."""


@dataclass(frozen=True, slots=True)
class ListedFragment:
    """A stored fragment: the journal's content [begin, end) as one file.

    `length` is the content's length in bytes; the file may be shorter, by its `codec`. `sha1` is the SHA-1 of the
    content in hexadecimal. `url` is the path of a file, or the URL of an object; a signed URL is readable without
    credentials until the manifest's `urls_expire_at`. `stored_at` is when the store received the file, in Unix seconds.
    """

    journal: str
    begin: int
    end: int
    length: int
    sha1: str
    codec: str
    stored_at: int
    store: str
    path_postfix: str
    url: str

    @classmethod
    def of(cls, fragment: Fragment, url: str) -> ListedFragment:
        return cls(
            fragment.journal,
            fragment.begin,
            fragment.end,
            fragment.length,
            fragment.sum.hex(),
            fragment.codec.name.lower(),
            fragment.mod_time,
            fragment.backing_store,
            fragment.path_postfix,
            url,
        )

    @property
    def fragment(self) -> Fragment:
        """The fragment. Raises InvalidInput for invalid fields."""
        try:
            codec, digest = Codec[self.codec.upper()], bytes.fromhex(self.sha1)
        except (KeyError, ValueError):
            raise InvalidInput(f"{self.codec!r} and {self.sha1!r} are not a codec and a SHA-1 sum") from None
        if self.length != self.end - self.begin:
            raise InvalidInput(f"[{self.begin}, {self.end}) has not the length {self.length}")
        return Fragment(
            self.journal, self.begin, self.end, digest, codec, self.store, self.stored_at, self.path_postfix
        ).validated()


@dataclass(frozen=True, slots=True)
class JournalPart:
    """The part of a journal that a manifest claims: the content [begin, end), all of it in `fragments`.

    The first and the last fragment may extend beyond it. Content [end, unstored_end) was acknowledged when the manifest
    was made, and no store had it yet. `revision` is the etcd revision that created the journal: a recreated journal has
    another revision.
    """

    journal: str
    begin: int
    end: int
    unstored_end: int
    content_type: str
    revision: int
    fragments: Sequence[ListedFragment] = ()
    sources: Sequence[str] = ()
    """The other journals whose fragments it shares, if it is a fork."""

    @property
    def unstored(self) -> int:
        """The bytes that were acknowledged and not stored yet."""
        return self.unstored_end - self.end

    def check(self) -> None:
        """Raise InvalidInput unless the fragments hold every byte of [begin, end)."""
        if not 0 <= self.begin <= self.end <= self.unstored_end:
            raise InvalidInput(
                f"{self.journal}: [{self.begin}, {self.end}) and {self.unstored_end} are not ascending offsets",
                field="manifest",
            )
        for each in self.fragments:
            try:
                _ = each.fragment
            except InvalidInput as error:
                raise InvalidInput(
                    f"{self.journal}: the fragment at {each.begin} is not valid: {error.message}", field="manifest"
                ) from None
            if each.journal not in (self.journal, *self.sources):
                raise InvalidInput(f"{self.journal}: lists a fragment of {each.journal}", field="manifest")
        at = self.begin
        for each in self.chain():
            if each.begin > at:
                break
            at = each.end
        if at < self.end:
            raise InvalidInput(
                f"{self.journal}: no fragment of the manifest has the content at {at}, and it claims all up to "
                f"{self.end}. It was changed: make it again with `coranto journals manifest`",
                field="manifest",
            )

    def chain(self) -> list[ListedFragment]:
        """Return the fragments to read, in order. Each has content that the ones before lack."""
        return list(CoverSet(self.fragments))


@dataclass(frozen=True, slots=True)
class Manifest:
    """The stored fragments of the journals that `selector` chose. Times are Unix seconds.

    With `as_of`, scans leave out messages with a later time in their UUIDs. Only manifests of an early version have
    `as_of`; later ones end at the offsets of that time. `urls_expire_at` is None if no URL expires.
    """

    selector: str
    made_at: float
    journals: Sequence[JournalPart]
    as_of: float | None = None
    urls_expire_at: float | None = None
    cluster: str = ""
    format: int = FORMAT

    @property
    def fragments(self) -> list[ListedFragment]:
        """The fragments of all journals."""
        return [fragment for part in self.journals for fragment in part.fragments]

    @property
    def unstored(self) -> int:
        """The bytes of all journals that were acknowledged and not stored yet."""
        return sum(part.unstored for part in self.journals)

    def to_json(self, *, indent: int | None = None) -> str:
        return _MANIFEST.dump_json(self, indent=indent).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Parse a manifest. Raises InvalidInput for other text, and if fragments do not cover the claimed content."""
        manifest = parse_document(_MANIFEST, text, name="manifest", field="manifest", newest=FORMAT)
        names = [part.journal for part in manifest.journals]
        if len(set(names)) < len(names):
            raise InvalidInput(
                "names a journal twice; make it again with `coranto journals manifest`", field="manifest"
            )
        for part in manifest.journals:
            part.check()
        return manifest


_MANIFEST: Final = pydantic.TypeAdapter(Manifest)
