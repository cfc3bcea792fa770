"""For a driver outside of a stack, such as a trainer: sends `/run` and lives through the stack's recoveries.

    async with RolloutClient(["http://counter-env-0:8000"]) as client:
        answer = await client.run("12-0", task)

Needs httpx and the protocol's own types, and no token.
"""

from gym_servers.client.rollouts import Answer, NotInService, RolloutClient, RunFailed

__all__ = ["Answer", "NotInService", "RolloutClient", "RunFailed"]
