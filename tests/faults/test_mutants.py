"""The mutations are those of this product: each can be applied, and says something else than what was there."""

from __future__ import annotations

from collections import Counter

import pytest

from gym_faults.mutants import MUTANTS, Mutant
from gym_faults.mutate import PRODUCT, PROJECT, NotApplicable, mutated


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutation_applies_once_and_is_still_python(mutant: Mutant) -> None:
    source = (PROJECT / PRODUCT / mutant.file).read_text()
    assert mutant.old != mutant.new
    compile(mutated(source, mutant), mutant.file, "exec")


def test_a_mutation_of_another_product_is_refused_by_name() -> None:
    gone = Mutant("a promise", "control/lease.py", "no such text", "")
    with pytest.raises(NotApplicable, match=r"'a promise'.* 0 times in servers/gym_servers/control/lease\.py"):
        mutated("something else", gone)
    with pytest.raises(NotApplicable, match="2 times"):
        mutated("no such text, no such text", gone)


def test_names_tell_mutants_apart() -> None:
    assert max(Counter(mutant.name for mutant in MUTANTS).values()) == 1
