"""The gate every data call passes: is admission open, and may this attempt still act?

The control plane moves the gate; participants wait at it. All waiting is level-triggered: a waiter looks at the
phase again after each wake-up, so that one that belongs to an older checkpoint has no effect on a newer one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.fence import Fence
from gym_servers.protocol.identity import Episode
from gym_servers.protocol.phases import OPEN_CHECKPOINT, Control, Phase


class Gate:
    """Admission and fencing of one process.

    `enabled=False` is a process without checkpointing: always open, never stale. `clock` is monotonic seconds.
    """

    def __init__(
        self,
        *,
        enabled: bool = True,
        coordinated: bool = True,
        attempt_floor: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.enabled = enabled
        self.clock = clock
        self.fence = Fence(enforce_floor=attempt_floor)
        self.control = Control(Phase.STARTING if enabled and coordinated else Phase.IDLE)
        self._changed = asyncio.Event()

    @property
    def phase(self) -> Phase:
        return self.control.phase

    @property
    def is_open(self) -> bool:
        return self.control.phase is Phase.IDLE

    @property
    def checkpoint_open(self) -> bool:
        """A checkpoint is being taken: from prepare to resume."""
        return self.control.phase in OPEN_CHECKPOINT

    def move(self, control: Control) -> None:
        """Set the state, and let everybody who waits look again."""
        self.control = control
        self.touch()

    def touch(self) -> None:
        """Something changed that readiness or a waiter may depend on."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_change(self) -> None:
        """Until the next touch. Whoever waits for a condition tests it before each wait, without an await
        between the test and this call."""
        await self._changed.wait()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self.wait_change()

    async def wait_open(self) -> None:
        """Until admission is open. A process that is `starting` or `restored` counts as closed."""
        await self.wait_until(lambda: self.is_open)

    async def wait_checkpoint_closed(self) -> None:
        await self.wait_until(lambda: not self.checkpoint_open)

    def require_open(self) -> None:
        """Raise `admission_closed` where a new call may not start now."""
        if not self.is_open:
            raise ProtocolError("admission_closed", f"no new work is admitted in phase {self.phase}; try again")

    def require_named(self, episode: Episode | None) -> None:
        """Raise `rollout_id_required` for work without an episode where one is needed."""
        if self.enabled and episode is None:
            raise ProtocolError("rollout_id_required", "call below /ng-rollout/<rollout id>/ with checkpointing on")

    async def enter(self) -> None:
        """Wait while a checkpoint is open here; raise `admission_closed` in a process that is not in service."""
        while self.checkpoint_open:
            await self.wait_checkpoint_closed()
        self.require_open()

    def admit(self, episode: Episode) -> None:
        """Raise `stale_attempt` for a replaced attempt, and fence everything below this one."""
        if self.enabled:
            self.fence.admit(episode)
