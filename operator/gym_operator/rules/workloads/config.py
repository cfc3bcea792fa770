"""The ConfigMap with every server's settings, and the Secret that the stack's processes share."""

from __future__ import annotations

import json
from typing import Any, Final

from gym_operator.api import names
from gym_operator.rules.workloads.common import Manifest, StackContext, child, stack_labels
from gym_servers.stack.cells import Cells
from gym_servers.stack.render import render_settings

SETTINGS_FOLDER: Final = "/etc/gym"
CELLS_FILE: Final = "cells"
"""Key and file name of the numbers of cells. Beside the settings and not in them: a pod need not be replaced for it,
its file is brought up to date while it runs."""


def settings_file(server: str) -> str:
    """Key of a server's settings in the ConfigMap, and its file name in the pod."""
    return f"{server}.json"


def stack_settings(context: StackContext) -> dict[str, dict[str, Any]]:
    """The settings of every server, by name, the same for all cells."""
    return render_settings(
        context.identity,
        context.spec,
        lambda server: f"http://{names.data_service(context.name, server, '{cell}')}:{names.DATA_PORT}",
        image=context.spec.image or "",
        cells_file=f"{SETTINGS_FOLDER}/{CELLS_FILE}",
        engine=f"http://{names.engine(context.name)}:{names.ENGINE_PORT}",
    )


def settings_text(settings: dict[str, Any]) -> str:
    """A server's settings as they stand in its file: the same text for the same settings."""
    return json.dumps(settings, sort_keys=True, indent=2)


def config_map(context: StackContext) -> Manifest:
    """`<stack>-config`: one JSON document per server, and the numbers of cells for their drivers."""
    files = {settings_file(name): settings_text(value) for name, value in stack_settings(context).items()}
    cells = Cells(context.spec.cells, max(context.cells, context.at_work))
    data = {**files, CELLS_FILE: cells.text}
    return child(context, "v1", "ConfigMap", names.config_map(context.name), stack_labels(context), data=data)


def control_secret(context: StackContext, control_token: str, cookie_secret: str) -> Manifest:
    """`<stack>-control`, made once with random values.

    The token can be rotated, with the old one beside it for a while. The cookie secret must outlive every pod:
    sessions inside checkpoints are signed with it.
    """
    return child(
        context,
        "v1",
        "Secret",
        names.control_secret(context.name),
        stack_labels(context),
        type="Opaque",
        stringData={names.CONTROL_TOKEN_KEY: control_token, names.COOKIE_SECRET_KEY: cookie_secret},
    )
