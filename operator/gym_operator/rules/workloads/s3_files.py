"""The Secrets that an S3 client needs, as files of a pod.

Files and not variables: a pod sees files change, and a rotation costs no process.
"""

from __future__ import annotations

from typing import Any, Final

from gym_operator.api import names
from gym_operator.rules.workloads.common import StackContext
from gym_servers.storage.s3_access import CA_FILE, CREDENTIALS_FOLDER

CREDENTIALS: Final = "s3-credentials"
AUTHORITIES: Final = "s3-authorities"
CREDENTIALS_MOUNT: Final = "/etc/gym-s3"
CA_MOUNT: Final = "/etc/gym-s3-ca"
READABLE: Final = 0o440
"""For the pod's group, which is the process's."""


def s3_environment(context: StackContext) -> list[dict[str, Any]]:
    """Where the process finds them."""
    places = {
        CREDENTIALS: (CREDENTIALS_FOLDER, CREDENTIALS_MOUNT),
        AUTHORITIES: (CA_FILE, f"{CA_MOUNT}/{names.CA_KEY}"),
    }
    return [{"name": places[volume][0], "value": places[volume][1]} for volume in _secrets(context)]


def s3_volumes(context: StackContext) -> list[dict[str, Any]]:
    return [
        {"name": volume, "secret": {"secretName": secret, "defaultMode": READABLE}}
        for volume, secret in _secrets(context).items()
    ]


def s3_mounts(context: StackContext) -> list[dict[str, Any]]:
    places = {CREDENTIALS: CREDENTIALS_MOUNT, AUTHORITIES: CA_MOUNT}
    return [{"name": volume, "mountPath": places[volume], "readOnly": True} for volume in _secrets(context)]


def _secrets(context: StackContext) -> dict[str, str]:
    """The Secrets, by the name of their volume."""
    s3 = context.spec.s3
    if s3 is None:
        return {}
    wanted = {CREDENTIALS: s3.credentials_secret, AUTHORITIES: s3.ca_secret}
    return {volume: secret for volume, secret in wanted.items() if secret}
