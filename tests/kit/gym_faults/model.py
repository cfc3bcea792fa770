"""What must hold of a cell whatever happens to it: protocol section 6, as simply as it can be said.

Nothing here asks the code under test. Trajectories follow from the scripted policy, the rest from what went over the
wire, into the journal and into storage. Each method raises Violation, which names the invariant.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gym_servers.engine.script import next_text

KINDS = {"environment", "model", "agent", "resources", "collection"}
Row = Mapping[str, Any]


class Violation(AssertionError):
    """An invariant does not hold."""


def require(holds: object, invariant: int, message: str) -> None:
    if not holds:
        raise Violation(f"invariant {invariant}: {message}")


def split(key: str) -> tuple[str, int]:
    """The rollout and attempt of a capture key."""
    rollout, mark, attempt = key.rpartition("-a")
    return (rollout, int(attempt)) if mark and attempt.isdigit() else (key, 0)


def joined(rollout: str, attempt: int) -> str:
    return f"{rollout}-a{attempt}" if attempt else rollout


# ---- 1: what is published is whole ------------------------------------------------------------------------


def check_publication(folder: Path) -> dict[str, Any]:
    """A published checkpoint, read without the product: every digest holds, and its parts fit together."""
    document: dict[str, Any] = json.loads((folder / "checkpoint.json").read_bytes())
    records: dict[str, dict[str, bytes]] = {}
    require({m["kind"] for m in document["members"]} == KINDS, 1, "a participant is missing in a publication")
    for member in document["members"]:
        where = f"{folder.name}/{member['kind']}"
        records[member["kind"]] = read_records(folder, member, where)
    manifest = json.loads((folder / "environment" / "env" / "manifest.json").read_bytes())
    require(set(document["episodes"]) == set(manifest["episodes"]), 1, "the restorable set is not what env exported")
    require(set(records["environment"]) == set(document["episodes"]), 1, "the restorable set has no records")
    require(set(document["episodes"]) <= set(document["scope"]), 1, "something was exported outside the scope")
    for key in document["episodes"]:
        check_cut(key, records)
    return document


def read_records(folder: Path, member: Mapping[str, Any], where: str) -> dict[str, bytes]:
    """One participant's records, every digest checked."""
    data = (folder / member["kind"] / member["instance"] / "manifest.json").read_bytes()
    require(sha(data) == member["manifest_digest"], 1, f"{where}: the manifest is another one")
    manifest = json.loads(data)
    require(manifest["session"] == member["session"], 1, f"{where}: written by another process")
    for pack in manifest["packs"]:
        body = (folder / pack["key"]).read_bytes()
        require((len(body), sha(body)) == (pack["size"], pack["sha256"]), 1, f"{where}: a pack is damaged")
    found = {}
    for entry in manifest["records"]:
        body = (folder / entry["pack"]).read_bytes()[entry["offset"] : entry["offset"] + entry["length"]]
        require(sha(body) == entry["sha256"], 1, f"{where}: record {entry['id']} is damaged")
        found[entry["id"]] = body
    return found


def stages(folder: Path) -> dict[str, str]:
    """Capture key -> the stage from which a checkpoint continues it."""
    document = json.loads((folder / "checkpoint.json").read_bytes())
    environment = next(member for member in document["members"] if member["kind"] == "environment")
    return {key: json.loads(data)["stage"] for key, data in read_records(folder, environment, "env").items()}


def check_cut(key: str, records: Mapping[str, Mapping[str, bytes]]) -> None:
    """One episode's records are of one moment: what the agent has seen happen has happened, and nothing else has."""
    stage = json.loads(records["environment"][key])["stage"]
    agents = [r for r in map(json.loads, records["agent"].values()) if r["episode"] == key]
    tools = [r for r in map(json.loads, records["resources"].values()) if r["episode"] == key]
    if stage in ("invoke_agent", "close_agent", "verify"):
        require(len(tools) == 1, 1, f"{key} stands before {stage}, but has {len(tools)} tool sessions")
    if stage != "invoke_agent":
        return
    require(len(agents) == 1, 1, f"{key} stands before {stage}, but has {len(agents)} agent sessions")
    done = agents[0]["activation"] or (agents[0]["reply"] or {"response": {"output": []}})["response"]
    seen = [item for item in done.get("items", done.get("output", ())) if item["type"] == "function_call"]
    additions = [call for call in seen if call["name"] == "increment_counter"]
    require(
        tools[0]["effects"] == len(additions),
        1,
        f"{key}: the agent saw {len(additions)} effects, its tools had {tools[0]['effects']}",
    )
    if (active := agents[0]["activation"]) is not None:
        heads = [json.loads(data.partition(b"\n")[0]) for data in records["model"].values()]
        delivered = sum(len(head["calls"]) for head in heads if head["key"] == key)
        require(
            active["model_calls"] <= delivered <= active["model_calls"] + 1,
            1,
            f"{key}: the agent had {active['model_calls']} replies, the ledger has {delivered}",
        )


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# ---- 2: one row, effects once, the same trajectory --------------------------------------------------------


def trajectory(row: Row) -> tuple[list[tuple[str, str]], int]:
    """What an uninterrupted rollout of a counter row says, calls and is answered, and in how many tokens."""
    count, items = int(row["initial_count"]), list(row["responses_create_params"]["input"])
    said: list[tuple[str, str]] = []
    tokens = 0
    while True:
        turn = next_text(items)
        tokens += len(turn.encode())
        text, tag, call = turn.partition("<tool_call>")
        said.append(("says", text.strip()))
        if not tag:
            return said, tokens
        asked = json.loads(call.removesuffix("</tool_call>"))
        count += asked["arguments"].get("count", 0)
        answer = {"success": True} if asked["arguments"] else {"count": count}
        said += [("calls", f"{asked['name']} {asked['arguments'] or {}}"), ("hears", json.dumps(answer))]
        items += [{"type": "function_call"}, {"type": "function_call_output", "output": json.dumps(answer)}]


def told(output: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """A result row's trajectory in the same words."""
    words = {"message": "says", "function_call": "calls", "function_call_output": "hears"}

    def text(item: Mapping[str, Any]) -> str:
        match item["type"]:
            case "message":
                return str(item["content"][0]["text"])
            case "function_call":
                return f"{item['name']} {json.loads(item['arguments'])}"
            case _:
                return str(item["output"])

    return [(words[item["type"]], text(item)) for item in output]


def check_rows(rows: Sequence[Row], wanted: Mapping[str, Row]) -> None:
    """One row for each rollout, and each as if nothing had happened."""
    found = sorted(row["_ng_rollout_id"] for row in rows)
    require(found == sorted(wanted), 2, f"rows of {found}, wanted one of each of {sorted(wanted)}")
    for row in rows:
        name, task = row["_ng_rollout_id"], wanted[row["_ng_rollout_id"]]
        require("response" in row and "reward" in row, 2, f"{name} has a row without a result")
        (expected, tokens), got = trajectory(task), told(row["response"]["output"])
        require(got == expected, 2, f"the trajectory of {name} is another one: {got} instead of {expected}")
        used = row["response"]["usage"]["output_tokens"]
        require(used == tokens, 2, f"{name} counts {used} tokens of {tokens}")
        require(row["reward"] == 1.0, 2, f"{name} has reward {row['reward']}")


# ---- 3: attempts ------------------------------------------------------------------------------------------


@dataclass
class Fenced:
    """What one process has promised: nothing below the floor, nothing at or below a rollout's mark."""

    floor: int = 0
    marks: dict[str, int] = field(default_factory=dict)

    def is_stale(self, rollout: str, attempt: int) -> bool:
        return attempt < self.floor or attempt <= self.marks.get(rollout, -1)


class Attempts:
    """Who may still act, and which numbers are used up."""

    def __init__(self) -> None:
        self.fences: dict[str, Fenced] = {}
        self.sent: dict[tuple[str, int], str] = {}
        self.sessions: dict[tuple[str, int], str] = {}
        self.recoveries: dict[int, float] = {}
        self.ran: set[str] = set()  # rollouts whose driver has its answer, and forgets them any moment
        self.over: set[str] = set()  # rollouts that were forgotten

    def fence(self, process: str) -> Fenced:
        return self.fences.setdefault(process, Fenced())

    def acts(self, process: str, key: str, what: str) -> None:
        """A process did something in the name of an episode."""
        rollout, attempt = split(key)
        stale = self.fence(process).is_stale(rollout, attempt)
        require(not stale, 3, f"{process} had fenced {key} off, and yet: {what}")

    def run(self, driver: str, rollout: str, attempt: int) -> None:
        """A driver's process sent a `/run`."""
        first = self.sent.setdefault((rollout, attempt), driver)
        require(first == driver, 3, f"attempt {attempt} of {rollout} was sent by {first} and by {driver}")

    def seeded(self, rollout: str, attempt: int, session: str) -> None:
        """An episode began. A seed may be repeated; another session is another beginning."""
        first = self.sessions.setdefault((rollout, attempt), session)
        require(
            first == session or rollout in self.over,
            3,
            f"attempt {attempt} of {rollout} began twice: {first}, {session}",
        )

    def recovered(self, attempt: int, started_at: float) -> None:
        """A recovery was persisted; it may be persisted again."""
        if attempt not in self.recoveries:
            used = sorted(key for key in self.sent if key[1] == attempt)
            require(not used, 3, f"the driver ran {used} under an attempt that a recovery took later")
            require(attempt > max(self.recoveries, default=0), 3, f"recovery {attempt} after {self.recoveries}")
            self.recoveries[attempt] = started_at
        require(self.recoveries[attempt] == started_at, 3, f"two recoveries have attempt {attempt}")


# ---- 5, 6: what is exported, and what is restored ----------------------------------------------------------


def check_unchanged(who: str, kind: str, ready: Mapping[str, bytes], frozen: Mapping[str, bytes]) -> None:
    """Nothing changed from readiness to the freeze. An episode whose step may be repeated goes on with it: where that
    fails, it has left."""
    for name, data in frozen.items():
        require(name in ready, 5, f"{who}: record {name} appeared after it was ready")
        require(ready[name] == data, 5, f"{who}: record {name} changed after it was ready")
    missing = sorted(
        name for name in set(ready) - set(frozen) if not (kind == "environment" and _repeats(ready[name]))
    )
    require(not missing, 5, f"{who}: {missing} vanished after it was ready")


def _repeats(record: bytes) -> bool:
    document = json.loads(record)
    verifies_again = document["state"].get("verify_replays", False)
    return document["stage"] in ("seed", "invoke_agent") or (document["stage"] == "verify" and verifies_again)


_KEY = re.compile(rb'"(?:episode|key)":"([^"]+)"')


def episode_of(kind: str, name: str, data: bytes) -> str:
    """The capture key of a record."""
    if kind == "environment":
        return name
    found = _KEY.search(data)
    return found[1].decode() if found else ""


def restored_as(kind: str, records: Mapping[str, bytes], attempts: Mapping[str, int]) -> dict[str, bytes]:
    """The records as they have to be found again after their restore: the same, under other attempts.
    `attempts`: capture key -> the attempt it continues under; others are left out."""
    result = {}
    for name, data in records.items():
        key = episode_of(kind, name, data)
        if key not in attempts:
            continue
        new = joined(split(key)[0], attempts[key])
        if kind == "environment":
            result[new] = data
        else:
            old = _KEY.search(data)
            assert old is not None
            result[new if kind == "model" else name] = data[: old.start(1)] + new.encode() + data[old.end(1) :]
    return result
