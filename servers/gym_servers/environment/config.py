"""What an environment server's `config` may hold."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from gym_servers.participants.limits import Limits


class EnvironmentConfig(BaseModel):
    """`agent`, `resources`: names of the servers an episode runs on, where there are several. Times are seconds."""

    model_config = ConfigDict(extra="forbid", strict=True)

    agent: str | None = None
    resources: str | None = None
    checkpoint_boundaries: bool | None = None
    """False: episodes are never continued, they start over after a death. Default: what the server can do."""
    default_episode_timeout_seconds: float = Field(Limits.episode_timeout_seconds, gt=0)
    """How long an episode may work. Time in which a checkpoint or closed admission makes it stand does not count."""
    max_concurrent_episodes: int | None = Field(Limits.max_concurrent_episodes, ge=1)
    """Episodes at work at the same time; others queue. No limit by default."""
    queue_timeout_seconds: float | None = Field(Limits.queue_timeout_seconds, gt=0)
    """How long an episode may queue. No limit by default."""
    cleanup_timeout_seconds: float = Field(Limits.cleanup_timeout_seconds, gt=0)
    """How long ending an episode's sessions may take."""

    def limits(self) -> Limits:
        return Limits(
            self.default_episode_timeout_seconds,
            self.max_concurrent_episodes,
            self.queue_timeout_seconds,
            self.cleanup_timeout_seconds,
        )
