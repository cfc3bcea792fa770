"""Reads a reply while it is generated, by the tokenizer's response template: what is certain of text and reasoning.

The library strips most regions when they close. So white space at a region's end is held back until something follows
it, and white space at its beginning is not given where it will be stripped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from gym_servers.model.dialect import Piece

FIELDS = {"content": "content", "reasoning_content": "reasoning", "thinking": "reasoning"}
"""Fields of a template, and what they are in a message."""
REPLACED = ("reasoning",)  # of several regions of such a field the last alone counts

Event = Mapping[str, Any]


def stripped_fields(template: Mapping[str, Any]) -> frozenset[str]:
    """The fields whose regions are stripped, as a template says."""
    fields: Mapping[str, Mapping[str, Any]] = template.get("fields", {})
    return frozenset(name for name, field in fields.items() if (field.get("content_args") or {}).get("strip", True))


class TemplateReading:
    """`feed_text` is the library's parser, `begun` what it has found in the prompt; `decode` gives the text that one
    more token adds, None while it is no whole character. `ends` are the tokens that end a turn."""

    def __init__(
        self,
        feed_text: Callable[[str], Iterable[Event]],
        begun: Iterable[Event],
        decode: Callable[[int], str | None],
        ends: Collection[int],
        stripped: Collection[str],
    ) -> None:
        self._feed_text, self._decode, self._ends, self._stripped = feed_text, decode, ends, stripped
        self._held, self._begins = "", True  # of the region that is open
        self._closed: set[str] = set()
        self._end: int | None = None
        self._broken = False
        self._early = self._pieces(begun)

    def feed(self, ids: Sequence[int]) -> list[Piece]:
        if self._broken:
            return []
        early, self._early = self._early, []
        try:
            return [*early, *self._pieces(self._feed_text("".join(map(self._text_of, ids))))]
        except Exception:  # a library's parser meets whatever a model may say: then it is read as a whole
            self._broken = True
            return early

    def _text_of(self, token: int) -> str:
        """The last end of a turn is no part of what was said; one that something follows is."""
        before, self._end = self._end, token if token in self._ends else None
        tokens = [each for each in (before, None if token in self._ends else token) if each is not None]
        return "".join(self._decode(each) or "" for each in tokens)

    def _pieces(self, events: Iterable[Event]) -> list[Piece]:
        found: list[Piece] = []
        for event in events:
            name = event["field"]
            field = FIELDS.get(name)
            if event["type"] == "region_open":
                self._held, self._begins = "", True
            elif event["type"] == "region_close":
                self._held = ""
                self._closed.add(name)
            elif field is not None and not event["dirty"] and not (field in REPLACED and name in self._closed):
                found.append(Piece(field, self._certain(name, event["text"])))
        return [piece for piece in found if piece.text]

    def _certain(self, name: str, text: str) -> str:
        if name not in self._stripped:
            return text
        text = self._held + text
        if self._begins:
            text = text.lstrip()
        said = text.rstrip()
        self._held, self._begins = text[len(said) :], self._begins and not said
        return said
