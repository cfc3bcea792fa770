"""The mutations that the random machine has to find: each breaks one promise of the protocol.

`old` has to be found exactly once in `file` (below `servers/gym_servers`); `make mutants` puts `new` in its place, in
a copy of the tree.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str


MUTANTS = (
    # ---- phases, leases and generations ----
    Mutant(
        "drop the generation check",
        "control/plane.py",
        "return self.gate.control.generation != generation or self.gate.control.checkpoint_id is None",
        "return False",
    ),
    Mutant(
        "park after resume: nobody is woken",
        "participants/gate.py",
        "        self.control = control\n        self.touch()",
        "        self.control = control",
    ),
    Mutant(
        "lease never expires",
        "control/lease.py",
        "call_later(self._grace, self._fire)",
        "call_later(self._grace * 1000, self._fire)",
    ),
    Mutant(
        "renew what is not open",
        "control/plane.py",
        "if self.gate.control.checkpoint_id != request.checkpoint_id or self.gate.phase not in LEASED:",
        "if False:",
    ),
    Mutant(
        "a verb opens the process after the one it was meant for",
        "control/plane.py",
        "if session is not None and session != self.author.session:",
        "if False:",
    ),
    Mutant(
        "a restore does not look again after reading",
        "control/plane.py",
        "judge(self.gate.control, Input.RESTORE, request.checkpoint_id)\n                self.gate.fence",
        "self.gate.fence",
    ),
    Mutant(
        "a fresh process admits work",
        "participants/gate.py",
        "            await self.wait_checkpoint_closed()\n        self.require_open()",
        "            await self.wait_checkpoint_closed()",
    ),
    # ---- attempts, floors, watermarks ----
    Mutant(
        "forget the watermark",
        "protocol/fence.py",
        "self.marks[rollout_id] = max(attempt, self.marks.get(rollout_id, -1))",
        "self.marks.setdefault(rollout_id, -1)",
    ),
    Mutant(
        "skip the floor",
        "protocol/fence.py",
        "return max(self.floor if self.enforce_floor else 0, self.marks.get(rollout_id, -1) + 1)",
        "return self.marks.get(rollout_id, -1) + 1",
    ),
    Mutant(
        "reuse an attempt number",
        "protocol/identity.py",
        "return max(0 if recorded is None else recorded + 1, cell_attempt)",
        "return max(0 if recorded is None else recorded, cell_attempt)",
    ),
    Mutant(
        "restore under the recorded attempt",
        "participants/base.py",
        "attempt = wanted if wanted is not None else next_attempt(last, cell_attempt)",
        "attempt = recorded.attempt",
    ),
    Mutant(
        "the driver does not persist its attempts",
        "participants/collection.py",
        "while attempt > self.gate.fence.floor and attempt not in self._owned:",
        "while False:",
    ),
    Mutant(
        "a recovery does not look at the attempts in use",
        "storage/cells.py",
        "            use_attempt_up(cell, attempt, owner)\n            return attempt",
        "            return above + 1",
    ),
    Mutant(
        "a retire does not wait for the end",
        "participants/environment.py",
        "        if ending:\n            await asyncio.wait(ending)",
        "        if ending:\n            await asyncio.sleep(0)",
    ),
    Mutant(
        "free a claimed session",
        "participants/agent.py",
        "for session in self._of(rollout, attempt)]",
        "for session in self._by_rollout.get(rollout, {}).values()]",
    ),
    # ---- what is exported ----
    Mutant(
        "environment exports outside the scope",
        "participants/environment.py",
        "if live.boundary is not None and scope.covers(key):",
        "if live.boundary is not None:",
    ),
    Mutant(
        "agent exports outside the scope",
        "participants/agent.py",
        "if scope.covers(session.episode.key) and session.episode.key not in left_out",
        "if session.episode.key not in left_out",
    ),
    Mutant(
        "mutate after ready: a held result moves its boundary",
        "participants/environment.py",
        "            if replay:\n                await self._park(live)\n            return result",
        "            return result",
    ),
    Mutant(
        "ready while a stage runs that cannot be repeated",
        "participants/environment.py",
        "if not (live.parked or live.replaying or live.restart)",
        "if not (live.parked or live.where or live.restart)",
    ),
    Mutant(
        "ready while a tool call runs",
        "participants/resources.py",
        "blockers = self._busy.blockers(self._restarts)",
        "blockers: list[Any] = []",
    ),
    Mutant(
        "the agent stands while its tools run",
        "participants/agent_turns.py",
        'activation.standing, activation.where = False, "tools"',
        'activation.standing, activation.where = True, "tools"',
    ),
    Mutant(
        "seeds and activations do not wait for the checkpoint",
        "participants/agent.py",
        "            await self.gate.enter()\n",
        "",
    ),
    Mutant(
        "tools do not wait for the checkpoint",
        "participants/resources.py",
        "            if not (replay and self.gate.checkpoint_open):\n"
        "                await self._enter(episode)\n"
        "            session = self._find(session_id, episode)\n"
        "            async with session.lock:\n"
        "                passes = replay and self.gate.checkpoint_open\n",
        "            session = self._find(session_id, episode)\n"
        "            async with session.lock:\n"
        "                passes = True\n",
    ),
    Mutant(
        "the ledger exports undelivered calls",
        "participants/model.py",
        "        record = await generate(call)\n        await self.gate.wait_checkpoint_closed()\n",
        "        record = await generate(call)\n",
    ),
    Mutant(
        "lose a held reply",
        "participants/model.py",
        "        record = await generate(call)\n",
        "        record = await generate(call)\n"
        "        if self.gate.checkpoint_open:\n"
        "            await asyncio.get_running_loop().create_future()\n",
    ),
    Mutant(
        "what nobody has claimed is not exported again",
        "participants/environment.py",
        "        for unclaimed in self._unclaimed.values():\n            if scope.covers(unclaimed.episode.key):",
        "        for unclaimed in self._unclaimed.values():\n            if False:",
    ),
    # ---- what is restored ----
    Mutant(
        "install half of a restore",
        "participants/agent.py",
        "        for one in staged:\n            if isinstance(one, AnsweredRow):\n                self",
        "        for one in staged[:1]:\n            if isinstance(one, AnsweredRow):\n                self",
    ),
    Mutant(
        "uninstall nothing on expiry",
        "control/plane.py",
        "            self.participant.uninstall()\n",
        "",
    ),
    Mutant(
        "forget the replies of tool calls at restore",
        "participants/tool_sessions.py",
        'session.replies = {call: (digest, reply) for call, (digest, reply) in record["replies"].items()}',
        "session.replies = {}",
    ),
    Mutant(
        "forget the ledger at restore",
        "participants/model.py",
        "            self._ledgers.install(key, calls)\n",
        "",
    ),
    Mutant(
        "forget what was generated when admission closed",
        "participants/model.py",
        "                self._prefixes[key] = prefixes\n",
        "                pass\n",
    ),
    Mutant(
        "cut calls go on growing in the checkpoint",
        "participants/model.py",
        "        cut = self._cutting.prefixes\n",
        "        from gym_servers.capture.cuts import freeze\n\n"
        "        cut = freeze(self._calls).prefixes if self._cutting.prefixes else {}\n",
    ),
    Mutant(
        "a prefix is not taken over",
        "participants/model.py",
        "        self._claim(call)\n",
        "",
    ),
    # ---- idempotence ----
    Mutant(
        "answer a tool call twice",
        "participants/resources.py",
        "if call_id is not None and call_id in session.replies:",
        "if False:",
    ),
    Mutant(
        "activation index ignored",
        "participants/agent_turns.py",
        "        if index is None:\n            return None",
        "        if index is not None or index is None:\n            return None",
    ),
    Mutant(
        "a model call is generated again",
        "participants/model.py",
        "        if known is not None:\n            same_request",
        "        if known is not None and False:\n            same_request",
    ),
    Mutant(
        "an episode that runs is not joined",
        "participants/environment.py",
        "if (live := self._live.get(episode.key)) is not None:",
        "if (live := self._live.get(episode.key)) is not None and False:",
    ),
    # ---- rows ----
    Mutant(
        "acknowledge before durable: a row that could not be written counts",
        "participants/collection.py",
        "await asyncio.sleep(OUTPUT_RETRY_SECONDS)",
        "return None  # type: ignore[return-value]",
    ),
    Mutant(
        "a row is written twice",
        "collection/output.py",
        "if rollout.id not in self._kept:",
        "if rollout.id not in self._kept or True:",
    ),
    Mutant(
        "a row for killed work",
        "participants/collection.py",
        'if refusal.code in ("stale_attempt", "session_lost", "checkpoint_conflict"):\n                return None',
        'if refusal.code in ("stale_attempt", "session_lost", "checkpoint_conflict"):\n'
        "                return RunResult(dict(rollout.row))",
    ),
    # ---- publishing and recovering ----
    Mutant(
        "publish without verifying",
        "coordination/checkpoint.py",
        "        await asyncio.to_thread(verify, self._store, publication.members, publication.checkpoint_id)\n",
        "",
    ),
    Mutant(
        "tombstone not written",
        "coordination/checkpoint.py",
        "        if not self._asked:\n            raise failure",
        "        if not self._asked or self._asked:\n            raise failure",
    ),
    Mutant(
        "a failed checkpoint is published by whoever settles it",
        "coordination/settle.py",
        "        if left.given_up:",
        "        if False:",
    ),
    Mutant(
        "what stands is not asked",
        "storage/cells.py",
        "    return read_publication(store.get(CHECKPOINT))",
        "    return wanted",
    ),
    Mutant(
        "restore what was given up",
        "storage/cells.py",
        'if publication.state != "published":\n        return None',
        "if False:\n        return None",
    ),
    Mutant(
        "resume not sent on failure",
        "coordination/checkpoint.py",
        "        else:\n            await self._resume()\n",
        "",
    ),
    Mutant(
        "session pin ignored: an agent session serves another attempt",
        "participants/agent.py",
        "if self.gate.enabled and episode != session.episode:",
        "if False:",
    ),
    Mutant(
        "resources are asked before those who call them",
        "coordination/order.py",
        'PREPARE = ("collection", "environment", "model", "agent", "resources")',
        'PREPARE = ("resources", "collection", "environment", "model", "agent")',
    ),
)
