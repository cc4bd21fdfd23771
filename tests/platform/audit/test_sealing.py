"""Signed records of audits: changes without the key are detected."""

from __future__ import annotations

import base64
import gzip
from dataclasses import replace

import pytest

from coranto.audit import Kind, Report, Severity
from coranto.audit.memory import StoreMemory
from coranto.audit.remembered import decode, encode
from coranto.audit.sealing import Seal
from coranto.auth import BearerToken, Keys
from coranto.errors import CorruptData, InvalidInput
from coranto.testing.cluster import STORE_URL
from tests.platform.audit.conftest import Damaged, J, Play

KEY, OTHER = (base64.b64encode(letter * 32).decode() for letter in (b"k", b"o"))
KEYS = Keys.parse(KEY)


async def audit(journal: Damaged, keys: Keys | None = KEYS) -> Report:
    return await journal.audit_with(StoreMemory(journal.stores.get(STORE_URL), Seal(keys)))


def problems(report: Report) -> set[Kind]:
    return {each.kind for each in report.findings if each.severity is not Severity.INFO}


def forge(content: bytes, journal: Damaged) -> bytes:
    """Return records with plausible times that omit the first fragment."""
    (record,) = decode(gzip.decompress(content)).journals.values()
    (first, *rest) = sorted(record.fragments)
    assert first.key[:2] == (journal.objects[0].fragment.begin, journal.objects[0].fragment.end)
    return gzip.compress(encode({J: replace(record, first=first.end, fragments=rest)}))


@pytest.mark.parametrize("keys", [None, KEYS])
def test_a_forged_record_hides_a_loss_unless_there_is_a_key(play: Play, keys: Keys | None) -> None:
    async def story(journal: Damaged) -> None:
        assert (await audit(journal, keys)).sound
        notes = journal.world.store.notes
        ((path, (at, content)),) = notes.items()
        notes[path] = at, forge(Seal(keys).unseal(content, path.rpartition("/")[2]), journal)
        journal.delete(journal.objects[0].fragment)
        await journal.later()
        found = problems(await audit(journal, keys))
        assert found == set() if keys is None else Kind.MEMORY_DAMAGED in found

    play(1, story)


def test_a_changed_renamed_or_foreign_signed_record_is_refused(play: Play) -> None:
    async def story(journal: Damaged) -> None:
        notes = journal.world.store.notes
        assert (await audit(journal)).sound
        assert not problems(await audit(journal))
        ((path, (at, content)), *_) = notes.items()
        name = path.rpartition("/")[2]
        plain = Seal(KEYS).unseal(content, name)
        head, _, signature = content.split(b".")
        forged = base64.urlsafe_b64encode(forge(plain, journal)).rstrip(b"=")
        later = path.replace(name, f"9{name[1:]}")
        planted = {
            path: b".".join([head, forged, signature]),
            later: content,
            f"{later[:-8]}.json.gz": Seal(Keys.parse(OTHER)).seal(plain, f"{later.rpartition('/')[2][:-8]}.json.gz"),
        }
        for where, data in planted.items():
            before = dict(notes)
            notes[where] = at, data
            report = await audit(journal)
            assert problems(report) == {Kind.MEMORY_DAMAGED}, where
            notes.clear()
            notes.update(before)

    play(1, story)


def test_keys_are_introduced_over_records_without_signatures(play: Play) -> None:
    async def story(journal: Damaged) -> None:
        for _ in range(3):
            assert (await audit(journal, None)).sound
        report = await audit(journal, KEYS)
        assert Kind.MEMORY_DAMAGED in problems(report)
        report = await audit(journal, Keys.parse(f"AA== {KEY}"))
        assert not problems(report)
        assert Kind.FIRST_AUDIT not in report.kinds()
        assert not problems(await audit(journal, Keys.parse(f"{OTHER} {KEY}")))  # A rotation.
        assert not problems(await audit(journal, Keys.parse(OTHER + " " + KEY)))

    play(1, story)


def test_an_audit_without_a_key_does_not_change_signed_records(play: Play) -> None:
    async def story(journal: Damaged) -> None:
        assert (await audit(journal)).sound
        before = dict(journal.world.store.notes)
        assert problems(await audit(journal, None)) == {Kind.MEMORY_UNREACHABLE}
        assert journal.world.store.notes == before

    play(1, story)


def test_only_keys_sign_records() -> None:
    assert Seal.of(KEYS).keys is KEYS
    assert Seal.of(BearerToken.parse("a.b.c")).keys is None
    assert Seal.of(None).seal(b"{}", "one") == b"{}"
    sealed = Seal(KEYS).seal(b"{}", "one")
    assert Seal(KEYS).unseal(sealed, "one") == b"{}"
    with pytest.raises(CorruptData, match="renamed"):
        Seal(KEYS).unseal(sealed, "two")
    with pytest.raises(InvalidInput, match="no key"):
        Seal().unseal(sealed, "one")
    with pytest.raises(CorruptData, match="not signed"):
        Seal(KEYS).unseal(b"{}", "one")
