"""How a caller wants tokens sampled, and whether a generation with these options can be continued from a prefix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gym_servers.capture.reasons import Reason
from gym_servers.model.conversation import Sampling

PASSED = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words"),
    *("response_format", "structured_outputs"),
)
NEUTRAL = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}


def sampling_of(params: Mapping[str, Any], max_tokens: Any, defaults: Mapping[str, Any]) -> Sampling:
    """The options of a request over the server's own. Raises ValueError for what is not of its form."""
    options = dict(defaults)
    options.update({name: params[name] for name in PASSED if params.get(name) is not None})
    for name in ("temperature", "top_p", "min_p", *NEUTRAL):
        if name in options and (isinstance(options[name], bool) or not isinstance(options[name], int | float)):
            raise ValueError(f"`{name}` must be a number")
    if max_tokens is not None and not _is_whole(max_tokens, 1):
        raise ValueError("the number of tokens to generate must be a whole number above 0")
    if options.get("min_tokens") is not None and not _is_whole(options["min_tokens"], 0):
        raise ValueError("`min_tokens` must be a whole number, 0 or above")
    if params.get("n") not in (None, 1):
        raise ValueError("`n` must be 1: a call of a rollout has one reply")
    return Sampling(max_tokens, options, unfaithful(options))


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def unfaithful(options: Mapping[str, Any]) -> str:
    """Why a generation under these options cannot go on behind a prefix that became part of the prompt; empty where
    it can.

    A grammar and a list of bad words are matched from the generation's first token, stop texts may lie across the
    cut, penalties count what was generated, and a seed starts its sequence again. A greedy generation draws nothing.
    """
    form = options.get("response_format")
    if options.get("structured_outputs") or (isinstance(form, dict) and form.get("type") not in (None, "text")):
        return Reason.CONSTRAINED
    if options.get("bad_words"):
        return Reason.CONSTRAINED
    if any(options.get(name, neutral) != neutral for name, neutral in NEUTRAL.items()):
        return Reason.PENALTIES
    if options.get("stop"):
        return Reason.STOP_TEXTS
    if options.get("seed") is not None and options.get("temperature") != 0:
        return Reason.SEED
    return ""


def continued(options: Mapping[str, Any], generated: int) -> dict[str, Any]:
    """The options for what follows after `generated` tokens: a copy, never the caller's own."""
    following = dict(options)
    if following.get("min_tokens"):
        following["min_tokens"] = max(0, following["min_tokens"] - generated)
    return following
