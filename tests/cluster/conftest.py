"""The whole cluster, the S3 server and the operator of the chart: brought up once for all that plays there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gym_kit.demo.stage import Grounds, grounds
from gym_kit.progress import Progress


@pytest.fixture(scope="session")
def whole_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grounds]:
    with grounds("auto", Progress.to_stderr(), tmp_path_factory.mktemp("demo")) as ready:
        yield ready
