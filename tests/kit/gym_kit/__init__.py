"""What the demo and the tests stand on: a Kubernetes cluster, an S3 bucket, the image and the command-line tools.

`gym_kit.cluster` brings a cluster up (or takes a given one), `gym_kit.bucket` runs a real S3 server beside it,
`gym_kit.image` builds the project's image and `gym_kit.tools` finds kubectl and helm. `python -m gym_kit` is the
same from a shell. Nothing in `operator/` or `servers/` depends on this package.
"""

from __future__ import annotations

from gym_kit.errors import KitError

__all__ = ["KitError"]
