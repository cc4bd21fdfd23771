"""Loading of objects named as `module:name`."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest

from coranto.errors import InvalidInput
from coranto_consumers.loading import load_target


def test_classes_and_functions_are_called_and_other_objects_are_returned() -> None:
    assert load_target("fractions:Fraction", numerator=3, denominator=6) == Fraction(1, 2)
    assert load_target("json:decoder.scanner") is json.decoder.scanner
    assert load_target("builtins:dict", a=1) == {"a": 1}


@pytest.mark.parametrize(
    ("target", "arguments", "problem"),
    [
        ("json", {}, "is not of the form module:App"),
        (":App", {}, "is not of the form module:App"),
        ("no_such_module_at_all:App", {}, "module no_such_module_at_all cannot be imported"),
        ("json:Nothing", {}, "module json has no Nothing"),
        ("json:decoder.Nothing", {}, "module json has no decoder.Nothing"),
        ("json:decoder", {"a": 1}, "is not a function, but arguments are given"),
        ("fractions:Fraction", {"a": 1}, "cannot be called with these arguments"),
    ],
)
def test_an_invalid_target_is_refused_with_the_reason(target: str, arguments: dict[str, int], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem) as refused:
        load_target(target, **arguments)
    assert refused.value.field == "application"
