"""The `config` of a policy model server, checked: every wrong field is named, and what to write instead."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

from gym_servers.model.sampling import PASSED, sampling_of

_URL = re.compile(r"https?://[^/\s]+(/[^\s?#]*)?")
_WRITE_URL = "write the engine's address alone, without /v1, such as http://vllm:8000"


class EngineConfig(BaseModel):
    """What every engine needs. `base_url`: its address without `/v1`. `model`: the name it serves the model under.
    `max_tokens`: of a call that does not say how many it wants. `return_token_ids`: replies bring token ids and
    log-probabilities along."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: str
    model: str = "scripted"
    max_tokens: int = Field(4096, ge=1)
    return_token_ids: bool = False
    cache_bytes: int = Field(256 * 1024 * 1024, ge=0)
    """Of captured calls in memory; what is more goes to files of this process."""
    weight_versions: bool = False
    """The engine tells the version of its weights at `/weight_info`; it is asked around each stream."""
    cut_at_engine: bool = False
    """The engine runs `gym_servers.worker.middleware`: cuts are made there, and lose nothing that is on its way."""

    @field_validator("base_url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        if not _URL.fullmatch(url) or url.rstrip("/").endswith("/v1"):
            raise ValueError(_WRITE_URL)
        return url


class VllmConfig(EngineConfig):
    """`tokenizer`: name or folder of the tokenizer, by default `model`. `chat_template`: one to use in place of the
    tokenizer's own; `chat_template_kwargs` are given to it. `response_template`: how replies are read where the
    tokenizer does not say so (see `gym_servers.model.response_templates`). `tool_parser`: a parser of vLLM's own in
    its place, where vLLM is installed here. `max_model_len`: tokens of prompt and generation together, by default
    what the engine says. `sampling`: options under those of each call."""

    model: Annotated[str, StringConstraints(min_length=1)]
    tokenizer: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    response_template: Literal["hermes"] | dict[str, Any] | None = None
    tool_parser: str | None = None
    max_model_len: int | None = Field(None, ge=1)
    sampling: dict[str, Any] = {}

    @field_validator("sampling")
    @classmethod
    def _known_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        unknown = sorted(set(options) - set(PASSED))
        if unknown:
            raise ValueError(f"unknown options {', '.join(unknown)}; known: {', '.join(PASSED)}")
        if not all(math.isfinite(value) for value in options.values() if isinstance(value, float)):
            raise ValueError("options are finite numbers")
        sampling_of(options, None, {})
        return options
