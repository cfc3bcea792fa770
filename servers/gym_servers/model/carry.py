"""Token ids over turns: a prompt takes its parent's tokens over as they were.

Tokens that were generated are not always the ones that their text would be split into. A prompt that is tokenised
again from text would then show the model, and a trainer, another history than the one that was sampled.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def carried(
    parent: Sequence[int],
    parent_rendered: Sequence[int],
    rendered: Sequence[int],
    ends: Collection[int],
) -> list[int] | None:
    """A prompt that begins with `parent`, the tokens of the parent's prompt and generation.

    `parent_rendered` is the template's form of the conversation up to and with the parent's reply, `rendered` of the
    whole conversation; `ends` are the tokens that end a turn. None where the template changes what came before, or
    where it is not seen how a turn ends: then `rendered` is all there is.
    """
    head = len(parent_rendered)
    if not parent or list(rendered[:head]) != list(parent_rendered):
        return None
    end = next((at for at in range(head - 1, -1, -1) if parent_rendered[at] in ends), None)
    if end is None:
        return None
    # What the template writes behind the turn's end was not generated. A reply that was cut short by its budget has
    # no end of its own: it gets the template's.
    behind = end + 1 if parent[-1] in ends else end
    return [*parent, *parent_rendered[behind:], *rendered[head:]]
