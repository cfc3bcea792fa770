import gc

import pytest

from gym_servers.loading import loading


def test_the_collector_rests_while_loading_and_leaves_what_was_loaded_alone() -> None:
    gc.unfreeze()
    with loading():
        assert not gc.isenabled()
        kept = [{} for _ in range(1000)]
    try:
        assert gc.isenabled()
        assert gc.get_freeze_count() >= len(kept)
    finally:
        gc.unfreeze()


def test_the_collector_works_again_after_a_failed_start() -> None:
    with pytest.raises(ValueError), loading():
        raise ValueError
    gc.unfreeze()
    assert gc.isenabled()
