"""A real one-node Kubernetes from plain processes, for machines without Docker.

`provider` is the entry: build and packages first, then `node` starts what `components` and `render` describe, `host`
changes the machine around it, `record` remembers, `teardown` undoes. `api_only` starts the API server alone.
"""

from __future__ import annotations

from gym_kit.cluster.local.api_only import ApiServer, api_server_only

__all__ = ["ApiServer", "api_server_only"]
