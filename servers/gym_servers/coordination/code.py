"""Whether the processes of a cell can read what a checkpoint holds, by what both say of their code. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from gym_servers.protocol.messages import Status
from gym_servers.storage.manifest import CodeIdentity, Publication

DRIVER = "collection"


def code_mismatch(publication: Publication, kinds: Mapping[str, str], statuses: Mapping[str, Status]) -> str:
    """Why these processes cannot continue from a checkpoint; empty where they can. `kinds`: name -> kind of every
    process there is; one that does not say what it reads is taken at its word when it restores.

    Images and configurations may differ: to change them is what continuing is for. A driver's records may be left:
    another may drive on.
    """
    there = {(member.kind, member.instance): member.code for member in publication.members}
    here = {(kind, name) for name, kind in kinds.items()}
    if missing := sorted(name for kind, name in here - there.keys()):
        return f"it has no records of {', '.join(missing)}"
    if homeless := sorted(name for kind, name in there.keys() - here if kind != DRIVER):
        return f"there is no server for its records of {', '.join(homeless)}"
    wrong = [_difference(name, there[kind, name], statuses.get(name)) for name, kind in sorted(kinds.items())]
    return "; ".join(one for one in wrong if one)


def _difference(name: str, theirs: CodeIdentity, status: Status | None) -> str:
    ours = status.code if status is not None else None
    if ours is None:
        return ""
    if ours.server != theirs.server:
        return f"{name} is {ours.server}, and its records are of {theirs.server}{_of(theirs.image)}"
    if ours.record_format < theirs.record_format:
        return (
            f"{name} reads records up to format {ours.record_format}, and its records are of format "
            f"{theirs.record_format}{_of(theirs.image)}"
        )
    return ""


def _of(image: str) -> str:
    return f" of image {image}" if image else ""
