"""What was measured: as a document for programs, as a table for people. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gym_bench.options import Options
from gym_bench.process import MIB


@dataclass(frozen=True)
class Point:
    """The operator beside so many finished checkpoints. Memory in MiB, times in seconds, `calls` and `s3_requests`
    are per minute at rest, `start_calls` and `start_s3_requests` are those from the start until every stack was
    looked at; `reconcile` are the times from a change of a spec to the status that speaks of it."""

    checkpoints: int
    rss_started: float
    rss_loaded: float
    rss_rest: float
    rss_peak: float
    ready_seconds: float
    all_seen_seconds: float
    start_calls: int
    start_s3_requests: int
    cpu_start_seconds: float
    cpu_per_minute: float
    calls: Mapping[str, float]
    s3_requests: float
    reconcile: Sequence[float]

    @property
    def calls_per_minute(self) -> float:
        return sum(self.calls.values())


def mebibytes(count: int) -> float:
    return round(count / MIB, 1)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def per_minute(counts: Counter[str], seconds: float) -> dict[str, float]:
    return {name: round(60 * count / seconds, 1) for name, count in sorted(counts.items())}


def document(options: Options, points: Sequence[Point], load: Mapping[str, float]) -> dict[str, Any]:
    """Everything, with what the whole history costs in proportion to a tenth of it."""
    little, much = points[0], points[-1]
    return {
        "options": asdict(options),
        "machine": dict(load),
        "points": [
            {
                **{name: value for name, value in asdict(each).items() if name != "reconcile"},
                "calls_per_minute": round(each.calls_per_minute, 1),
                "reconcile_p50": round(percentile(each.reconcile, 0.5), 4),
                "reconcile_p99": round(percentile(each.reconcile, 0.99), 4),
            }
            for each in points
        ],
        "ratios": {
            "history": _ratio(much.checkpoints, little.checkpoints),
            "calls_per_minute": _ratio(much.calls_per_minute, little.calls_per_minute),
            "cpu_per_minute": _ratio(much.cpu_per_minute, little.cpu_per_minute),
            "rss_rest": _ratio(much.rss_rest, little.rss_rest),
        },
    }


def _ratio(much: float, little: float) -> float | None:
    return round(much / little, 2) if little else None


def table(found: Mapping[str, Any]) -> str:
    """The document for a person."""
    points, options = found["points"], found["options"]
    rows: list[tuple[str, list[str]]] = [
        ("finished checkpoints", [f"{each['checkpoints']}" for each in points]),
        ("memory, just started (no objects)", [f"{each['rss_started']:.0f} MiB" for each in points]),
        ("memory, all objects seen", [f"{each['rss_loaded']:.0f} MiB" for each in points]),
        ("memory at rest", [f"{each['rss_rest']:.0f} MiB" for each in points]),
        ("memory, highest", [f"{each['rss_peak']:.0f} MiB" for each in points]),
        ("start until ready", [f"{each['ready_seconds']:.1f} s" for each in points]),
        ("start until every stack was looked at", [f"{each['all_seen_seconds']:.1f} s" for each in points]),
        ("API calls of the start", [f"{each['start_calls']}" for each in points]),
        ("S3 requests of the start", [f"{each['start_s3_requests']}" for each in points]),
        ("CPU of the start", [f"{each['cpu_start_seconds']:.1f} s" for each in points]),
        ("CPU per minute at rest", [f"{each['cpu_per_minute']:.2f} s" for each in points]),
        ("API calls per minute at rest", [f"{each['calls_per_minute']:.0f}" for each in points]),
        ("S3 requests per minute at rest", [f"{each['s3_requests']:.0f}" for each in points]),
        ("change of a spec to its status, p50", [f"{1000 * each['reconcile_p50']:.0f} ms" for each in points]),
        ("change of a spec to its status, p99", [f"{1000 * each['reconcile_p99']:.0f} ms" for each in points]),
    ]
    lines = [f"{options['stacks']} suspended stacks, {options['schedules']} schedules"]
    lines += [f"{name:<40}" + "".join(f"{value:>12}" for value in values) for name, values in rows]
    lines.append("API calls per minute at rest, by verb and kind:")
    for call in sorted({call for each in points for call in each["calls"]}):
        lines.append(f"  {call:<38}" + "".join(f"{each['calls'].get(call, 0):>12.1f}" for each in points))
    ratios = found["ratios"]
    lines.append(
        f"{ratios['history']} times the history costs {ratios['calls_per_minute']} times the calls, "
        f"{ratios['cpu_per_minute']} times the CPU and {ratios['rss_rest']} times the memory at rest"
    )
    lines.append(
        f"load of the machine (1 minute): {found['machine']['load_before']} before, "
        f"{found['machine']['load_after']} after"
    )
    return "\n".join(lines)
