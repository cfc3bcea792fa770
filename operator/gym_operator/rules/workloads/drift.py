"""Whether a child must be written again.

Comparing whole objects does not work: the API server fills in defaults. So every manifest carries the digest
of itself as it was built, and is written when a newly built one has another digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from gym_operator.api import names
from gym_operator.rules.workloads.common import Manifest


def digest(text: str) -> str:
    """A short name for a text: 32 hex digits of its SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def with_digest(manifest: Manifest) -> Manifest:
    """The manifest with its own digest as an annotation."""
    metadata = manifest["metadata"]
    own = digest(json.dumps(manifest, sort_keys=True))
    annotations = {**metadata.get("annotations", {}), names.APPLIED_DIGEST: own}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def needs_update(existing: Mapping[str, Any], desired: Manifest) -> bool:
    """Whether `desired` (built by `with_digest`) is something else than what was applied to `existing`."""
    return _applied(existing) != _applied(desired)


def is_foreign(existing: Mapping[str, Any], stack_uid: str) -> bool:
    """Whether an object under a child's name belongs to somebody else and must not be touched.

    Stack `a-b` with server `c` and stack `a` with server `b-c` want the same name; so does a stack made again
    before the old one's children are gone.
    """
    owners = existing.get("metadata", {}).get("ownerReferences") or []
    return not any(owner.get("controller") and owner.get("uid") == stack_uid for owner in owners)


def _applied(manifest: Mapping[str, Any]) -> str | None:
    annotations = manifest.get("metadata", {}).get("annotations") or {}
    value: str | None = annotations.get(names.APPLIED_DIGEST)
    return value
