"""The hierarchy of errors: as its page draws it, and one error for each status."""

from __future__ import annotations

import re

import pytest

from coranto import errors
from coranto.errors import CorantoError, InvalidInput, StatusError, UnknownStatus, status_error
from coranto.wire import protocol_pb2 as pb

STATUSES = [each for each in pb.Status.values() if each != pb.OK]


def test_the_drawn_tree_matches_the_classes() -> None:
    parents: list[type] = [CorantoError]
    drawn = set()
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"    ([│ ]*)[├└]── (\w+)", line):
            depth = len(match[1]) // 4 + 1
            found = getattr(errors, match[2])
            parents[depth:] = [found]
            assert parents[depth - 1] in found.__mro__[1:], f"{match[2]} is drawn below {parents[depth - 1].__name__}"
            drawn.add(found)
    defined = {
        each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, CorantoError) and each is not CorantoError
    }
    direct = {each for each in defined if each.__base__ is CorantoError}
    assert direct <= drawn, "each kind of error is in the tree"


@pytest.mark.parametrize("status", STATUSES, ids=pb.Status.Name)
def test_each_status_has_its_own_error_that_says_how_to_fix_it(status: pb.Status.ValueType) -> None:
    found = status_error(status, "append to a/journal", detail="it says more")
    assert type(found) is not UnknownStatus
    assert (found.status, type(found).__base__) == (status, StatusError)
    assert pb.Status.Name(status) in str(found)
    assert found.advice in str(found)


def test_a_status_of_a_newer_broker_is_an_error_with_its_number() -> None:
    found = status_error(9999, "append to a/journal", detail="of later")  # type: ignore[arg-type]
    assert isinstance(found, UnknownStatus)
    assert "status 9999; of later" in str(found)


def test_invalid_input_names_its_field_from_the_outside_in() -> None:
    inner = InvalidInput("is negative", field="length")
    outer = inner.within("fragment")
    assert outer.field == "fragment.length"
    assert "is negative" in str(outer)


def test_no_error_is_both_retriable_and_permanent() -> None:
    kinds = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, CorantoError)]
    both = {each for each in kinds if each.retriable and each.permanent}
    assert both == {errors.RejectedRow}  # Each error of a store states whether it is retriable.
    rejected = errors.RejectedRow("a value is too long")
    assert (rejected.retriable, rejected.permanent) == (False, True)
