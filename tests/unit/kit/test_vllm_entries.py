"""What vLLM generated, in the words in which a run is accounted for."""

from __future__ import annotations

from gym_servers.proof.history import sort_journal
from gym_servers.protocol.digests import digest_of
from gym_servers.protocol.identity import Episode
from gym_vllm.journal import Generated, as_entries

P = [1, 2, 3]


def stream(key: str, position: str, prompt: list[int], ids: list[int]) -> Generated:
    return Generated(key, position, prompt, ids, True, "stop", [(1.0, len(ids))])


def test_what_goes_on_behind_a_cut_is_of_the_prompt_that_it_began_with() -> None:
    streams = [
        stream("r", "1.1", P, [4, 5, 6]),
        stream("r-a1", "1.1", [*P, 4, 5], [6, 7]),  # cut behind two tokens
        stream("r-a2", "1.1", [*P, 4, 5, 6], [7, 8]),  # and behind one more, of the second
        stream("r-a2", "1.2", [*P, 4, 5, 6, 7, 8, 9], [10]),  # the next turn is none of them
        stream("other", "1.1", [*P, 4], [5]),
    ]
    found = [(entry["request"], entry["prompt"], entry["from"], entry["count"]) for entry in as_entries(streams)]
    assert found == [
        ("r/1.1", digest_of(P), 0, 3),
        ("r-a1/1.1", digest_of(P), 2, 2),
        ("r-a2/1.1", digest_of(P), 3, 2),
        ("r-a2/1.2", digest_of([*P, 4, 5, 6, 7, 8, 9]), 0, 1),
        ("other/1.1", digest_of([*P, 4]), 0, 1),
    ]
    journals = sort_journal(as_entries(streams))
    assert journals.tokens == 9
    assert journals.prompts[Episode("r", 1)] == {digest_of(P): 2}
