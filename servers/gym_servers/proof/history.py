"""The surviving history of each rollout, from journals and checkpoints.

A rollout's row names the attempt that answered it. If that attempt was seeded, its journal entries alone count: it
started over. If not, it continued a restored checkpoint: then the source attempt's entries up to the cut survive,
and before those whatever that attempt itself continued (protocol section 6, invariant 2).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gym_servers.capture.ledger import decode
from gym_servers.protocol.digests import digest_of
from gym_servers.protocol.identity import Episode, parse_key
from gym_servers.storage.manifest import Publication
from gym_servers.storage.packs import load_manifest, load_records
from gym_servers.storage.store import ObjectStore

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Cut:
    """One checkpoint as its records say: per capture key the effects counted, the model calls delivered, and how many
    tokens were kept of calls in progress, by their prompt."""

    effects: Mapping[str, int]
    calls: Mapping[str, frozenset[str]]
    episodes: frozenset[str]
    prefixes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def read_cut(store: ObjectStore, publication: Publication) -> Cut:
    """Read a published checkpoint's own records. Blocks. Raises ProtocolError where they do not verify."""
    effects: dict[str, int] = {}
    calls: dict[str, frozenset[str]] = {}
    prefixes: dict[str, dict[str, int]] = {}
    for member in publication.members:
        if member.kind not in ("resources", "model"):
            continue
        manifest, _ = load_manifest(store, member.directory, member.manifest_digest)
        for name, data in load_records(store, manifest).items():
            if member.kind == "resources":
                record = json.loads(data)
                effects[record["episode"]] = int(record["effects"])
            else:
                key, ledger = decode(name, data)
                calls[key] = frozenset(digest_of(list(call.prompt_ids)) for call in ledger.calls)
                prefixes[key] = {
                    digest_of(list(prefix.prompt_ids)): len(prefix.tokens.ids)
                    for prefix in ledger.prefixes
                    if not prefix.skipped
                }
    return Cut(effects, calls, frozenset(publication.episodes), prefixes)


@dataclass
class Journals:
    """Journal entries by episode."""

    effects: dict[Episode, list[Entry]] = field(default_factory=lambda: defaultdict(list))
    seeds: set[Episode] = field(default_factory=set)
    prompts: dict[Episode, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))  # to the first token
    tokens: int = 0


def sort_journal(entries: Sequence[Entry]) -> Journals:
    """Journals from the entries of the engine and of the resources servers."""
    journals = Journals()
    for entry in entries:
        if entry["kind"] == "tokens":
            journals.tokens += int(entry["count"])
            key = str(entry["request"]).partition("/")[0]
            if key != "-":
                known, prompt = journals.prompts[parse_key(key)], str(entry["prompt"])
                first = int(entry.get("from", 0))
                known[prompt] = min(first, known.get(prompt, first))
            continue
        episode = Episode(str(entry["rollout"]), int(entry["attempt"]))
        if entry["kind"] == "seed":
            journals.seeds.add(episode)
        elif entry["kind"] == "effect":
            journals.effects[episode].append(entry)
    return journals


@dataclass(frozen=True)
class History:
    """A rollout's surviving effects, and whether its last attempt continued an earlier one."""

    effects: list[Entry]
    continued: bool
    repeated: bool  # something delivered, done or generated before the cut occurs again in the continuing attempt
    kept_tokens: int = 0  # generated before a cut in calls that went on behind it


def surviving(episode: Episode, journals: Journals, restored: Mapping[int, Cut]) -> History:
    """The history of the attempt that answered. `restored`: cell attempt -> the checkpoint it continued from."""
    own = sorted(journals.effects.get(episode, []), key=lambda entry: int(entry["n"]))
    if episode in journals.seeds:
        return History(own, continued=False, repeated=False)
    cut = restored.get(episode.attempt)
    source = _source(episode, cut)
    if cut is None or source is None:
        # Neither seeded nor restored: what it did has no beginning, so nothing of it is proved.
        return History(own, continued=False, repeated=True)
    before = surviving(source, journals, restored)
    kept = before.effects[: cut.effects.get(source.key, 0)]
    done = {entry["call_id"] for entry in kept}
    delivered = cut.calls.get(source.key, frozenset())
    asked = journals.prompts.get(episode, {})
    prefixes = cut.prefixes.get(source.key, {})
    repeated = (
        before.repeated
        or any(entry["call_id"] in done for entry in own)
        or bool(delivered & set(asked))
        or any(asked.get(prompt, tokens) < tokens for prompt, tokens in prefixes.items())
    )
    kept_tokens = before.kept_tokens + sum(prefixes.values())
    return History([*kept, *own], continued=True, repeated=repeated, kept_tokens=kept_tokens)


def _source(episode: Episode, cut: Cut | None) -> Episode | None:
    """The episode of the checkpoint that this attempt continues."""
    if cut is None:
        return None
    found = [e for e in map(parse_key, cut.episodes) if e.rollout_id == episode.rollout_id]
    return found[0] if found and found[0].attempt < episode.attempt else None
