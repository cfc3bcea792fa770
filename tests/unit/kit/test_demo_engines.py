"""An engine is interrupted in the middle of a generation, and goes on whatever becomes of that."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast
from urllib.parse import parse_qsl, urlsplit

import httpx
import pytest

from gym_kit.demo import engines
from gym_kit.demo.engines import EngineBeside, EnginePod, in_mid_generation
from gym_kit.errors import KitError
from gym_vllm.engine import Engine
from gym_vllm.journal import HOLD, Generated, Hold, Streams


class FakeEngine:
    """Before each look a stream says some tokens; `says` has how many of each key, and whether it ends with them.
    What follows a "stand" is still said while the engine is told to."""

    def __init__(self, *says: tuple[str, int, bool] | Literal["stand"]) -> None:
        self.hold, self.paused, self.looks = Hold(), False, 0
        self._says = list(says)
        self._streams: dict[str, Generated] = {}

    def values(self, stack: str, release: str) -> dict[str, Any]:
        return {}

    def generated(self) -> list[Generated]:
        return list(self._streams.values())

    def get(self, path: str) -> Any:
        assert path == HOLD
        self.looks += 1
        self.say()
        return {"held": self.hold.held}

    def post(self, path: str) -> None:
        parts = urlsplit(path)
        if parts.path == HOLD:
            self.hold.told(dict(parse_qsl(parts.query)))
        else:
            assert path == "/resume"
            self.paused = False

    def say(self) -> None:
        if self._says and not self.paused:
            self.paused = self.hold.held = self.hold.passed(*self._passed())
            if self.paused and self._says[:1] == ["stand"]:
                del self._says[0]
                self.hold.passed(*self._passed())

    def _passed(self) -> tuple[str, int, bool]:
        said = self._says.pop(0)
        assert said != "stand"
        key, tokens, last = said
        stream = self._streams.setdefault(key, Generated(key, "", []))
        stream.ids += [0] * tokens
        stream.ended = last
        return key, tokens, last


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "LOOK_SECONDS", 0.0)


def test_it_works_on_until_enough_was_said_and_something_is_unsaid() -> None:
    engine = FakeEngine(("a", 9, False), ("a", 6, True), ("b", 1, False), ("b", 1, False))
    with in_mid_generation(engine, 10):
        assert (engine.paused, engine.looks) == (True, 3)
    assert not engine.paused


def test_what_has_said_its_last_words_meanwhile_is_not_in_its_middle() -> None:
    engine = FakeEngine(("a", 9, False), "stand", ("a", 1, True), ("b", 2, False), ("b", 1, False))
    with in_mid_generation(engine, 5):
        assert (engine.paused, engine.looks) == (True, 2)
        assert [(stream.key, stream.ended) for stream in engine.generated()] == [("a", True), ("b", False)]
    assert not engine.paused


def test_it_goes_on_where_what_was_done_meanwhile_failed() -> None:
    engine = FakeEngine(("a", 5, False))
    with pytest.raises(ZeroDivisionError), in_mid_generation(engine, 0):
        assert engine.paused
        raise ZeroDivisionError
    assert not engine.paused


def test_it_says_so_where_everything_has_been_said_and_holds_nothing_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "MIDDLE_SECONDS", 0.1)
    engine = FakeEngine(("a", 5, True))
    with pytest.raises(KitError, match="may have ended already"), in_mid_generation(engine, 0):
        pass
    engine._says.append(("a", 5, False))
    engine.say()
    assert not engine.paused


def test_a_pod_is_asked_through_the_api_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, ...]] = []

    def ask(kubeconfig: Path, *words: str, timeout: float) -> str:
        asked.append(words)
        return '{"held": true}'

    monkeypatch.setattr(engines, "ask", ask)
    monkeypatch.setattr(EnginePod, "generated", lambda _: [Generated("a", "", [], [1])])
    pod = EnginePod(Path("config"), cast(Any, SimpleNamespace(namespace="team")), "image:1", "demo", tmp_path)
    with in_mid_generation(pod, 20):
        pass
    at = "/api/v1/namespaces/team/services/demo-vllm:8000/proxy"
    assert [(verb, raw, *rest) for verb, _, raw, *rest in asked] == [
        ("create", f"{at}/test-hold?tokens=20", "--filename", "/dev/null"),
        ("get", f"{at}/test-hold"),
        ("create", f"{at}/test-hold", "--filename", "/dev/null"),
        ("create", f"{at}/resume", "--filename", "/dev/null"),
    ]


def test_a_process_is_asked_directly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, str]] = []
    status = 200

    def request(method: str, url: str, **_: Any) -> httpx.Response:
        asked.append((method, url))
        return httpx.Response(status, json={"held": True}, request=httpx.Request(method, url))

    monkeypatch.setattr(httpx, "request", request)
    monkeypatch.setattr(EngineBeside, "generated", lambda _: [Generated("a", "", [], [1])])
    beside = EngineBeside(Engine("http://here:1", Streams(tmp_path / "tokens"), tmp_path, "token"))
    with in_mid_generation(beside, 20):
        pass
    assert asked == [
        ("POST", "http://here:1/test-hold?tokens=20"),
        ("GET", "http://here:1/test-hold"),
        ("POST", "http://here:1/test-hold"),
        ("POST", "http://here:1/resume"),
    ]
    status = 503
    with pytest.raises(KitError, match="503"), in_mid_generation(beside, 20):
        pass
