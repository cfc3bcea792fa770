"""How a model server turns Responses parameters into token ids and generated ids into output items.

One implementation per engine. The model participant and the routes know only this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Dialect(Protocol):
    def render(self, params: Mapping[str, Any]) -> list[int]:
        """Prompt token ids. Raises ValueError for parameters this model cannot be given."""
        ...

    def parse(self, ids: Sequence[int], call_ids: str) -> list[dict[str, Any]]:
        """Output items of a generation; `call_ids` is the stem of tool call ids, so that equal trajectories have
        equal ids."""
        ...
