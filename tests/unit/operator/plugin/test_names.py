"""What may be asked for by name: nothing that would be more than a name in a request's path."""

from __future__ import annotations

import pytest

from gym_operator.plugin.cluster import check_name
from gym_operator.plugin.exits import Unusable


@pytest.mark.parametrize(
    "name", ["", "Demo", "a b", "a\nb", "..", ".", "-", "?x", "a?b", "a/status", "%2e", "é", "x" * 300]
)
def test_what_is_no_name_is_told_and_not_at_length(name: str) -> None:
    with pytest.raises(Unusable, match="is no name of gymstacks") as told:
        check_name("gymstacks", name)
    assert len(str(told.value)) < 200


@pytest.mark.parametrize("name", ["a", "0", "demo-1", "a.b", "x" * 253])
def test_a_name_is_one(name: str) -> None:
    check_name("gymstacks", name)
