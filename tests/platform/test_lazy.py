"""Names of a package that are imported at their first use."""

from __future__ import annotations

import json

import pytest

from coranto.lazy import lazy_names


def test_a_name_is_imported_from_its_module_and_unknown_names_are_refused() -> None:
    get = lazy_names("a_package", {"dumps": "json", "nothing": "json"})
    assert get("dumps") is json.dumps
    with pytest.raises(AttributeError, match="module 'a_package' has no attribute 'loads'"):
        get("loads")
    with pytest.raises(AttributeError, match="nothing"):
        get("nothing")
