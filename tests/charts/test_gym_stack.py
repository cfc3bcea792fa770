"""The stack's chart: what it renders is a stack the operator accepts, and its refusals say what to set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gym_kit.chart_values import assert_documented
from gym_operator.rules.workloads import StackContext, build_children
from gym_servers.stack.settings import StackIdentity
from gym_servers.stack.spec import StackSpec, parse_spec

Objects = dict[tuple[str, str], dict[str, Any]]
Render = Callable[..., Objects]
CHART = "gym-stack"
DEMO = {"demo.enabled": True, "s3.bucket": "bucket"}
SERVERS: list[dict[str, Any]] = [
    {"name": "world", "kind": "environment", "server": "single-agent-turn"},
    {"name": "policy", "kind": "model", "server": "vllm", "config": {"base_url": "http://llm:8000"}},
    {"name": "agent", "kind": "agent", "server": "simple-agent"},
    {"name": "tools", "kind": "resources", "server": "my.module:Tools"},
]


def spec_of(objects: Objects, name: str = "rel") -> StackSpec:
    return parse_spec(objects["GymStack", name]["spec"])


def container(objects: Objects, name: str) -> dict[str, Any]:
    (only,) = objects["Deployment", name]["spec"]["template"]["spec"]["containers"]
    return dict(only)


def test_lints(helm: Callable[..., Any]) -> None:
    done = helm("lint", "--strict", CHART, "--set=demo.enabled=true,s3.bucket=bucket")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_demo_is_a_whole_stack(render: Render) -> None:
    objects = render(CHART, DEMO)
    spec = spec_of(objects)
    by_kind = {server.kind: server for server in spec.servers}
    engine, journal = ("Service", "rel-engine"), ("Service", "rel-journal")
    assert engine in objects and journal in objects
    assert by_kind["model"].config["base_url"] == "http://rel-engine:8000"
    assert by_kind["resources"].config["journal"] == "http://rel-journal:8000"


def test_the_demo_s_engine_and_journal(render: Render) -> None:
    objects = render(CHART, {**DEMO, "demo.tokensPerSecond": 12.5})
    engine, journal = container(objects, "rel-engine"), container(objects, "rel-journal")
    assert engine["command"] + engine["args"] == [
        "gym-servers",
        "engine",
        "--host=0.0.0.0",
        "--port=8000",
        "--tokens-per-second=12.5",
        "--journal=http://rel-journal:8000",
    ]
    assert journal["command"] + journal["args"] == [
        "gym-servers",
        "journal",
        "--host=0.0.0.0",
        "--port=8000",
        "--file=/data/journal.jsonl",
    ]
    assert "/data" in [mount["mountPath"] for mount in journal["volumeMounts"]]
    assert objects["Deployment", "rel-journal"]["spec"]["strategy"] == {"type": "Recreate"}


@pytest.mark.parametrize("program", ["engine", "journal"])
def test_a_demo_service_selects_its_program_alone(render: Render, program: str) -> None:
    objects = render(CHART, DEMO)
    selector = objects["Service", f"rel-{program}"]["spec"]["selector"]
    for other in ("engine", "journal"):
        labels = objects["Deployment", f"rel-{other}"]["spec"]["template"]["metadata"]["labels"]
        assert (selector.items() <= labels.items()) == (other == program)


def test_without_the_demo_there_is_only_the_stack(render: Render) -> None:
    objects = render(CHART, {"servers": SERVERS, "s3.bucket": "bucket"})
    assert set(objects) == {("GymStack", "rel"), ("Pod", "rel-test")}
    assert [server.name for server in spec_of(objects).servers] == ["world", "policy", "agent", "tools"]


def test_all_values_arrive(render: Render) -> None:
    values = {
        "servers": SERVERS,
        "image": {"repository": "r.example/g", "tag": "v2", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "reg"}],
        "collection": {"tasks": "s3://bucket/t.jsonl", "output": "s3://bucket/rows", "repeats": 4},
        "cells": 3,
        "scaleDown": {"drainTimeout": "0s"},
        "checkpoints": {
            "prepareTimeout": "30s",
            "commitTimeout": "5m",
            "cellOrder": "Together",
            "restartBlockersAfter": 0,
        },
        "s3": {
            "bucket": "bucket",
            "prefix": "a/b",
            "endpoint": "http://s3:9000",
            "region": "eu-west-1",
            "addressingStyle": "path",
            "existingSecret": "keys",
        },
        "recovery": {"policy": "Restart", "backoffLimit": 9, "maxCheckpointAge": "2h"},
        "access": {"driverSelector": {"matchLabels": {"app": "trainer"}}, "attemptFloor": False},
        "suspend": True,
    }
    spec = spec_of(render(CHART, values))
    assert (spec.image, spec.image_pull_policy) == ("r.example/g:v2", "Always")
    assert [secret.name for secret in spec.image_pull_secrets] == ["reg"]
    assert spec.collection is not None and spec.collection.repeats == 4
    assert (spec.checkpoints.prepare_timeout, spec.checkpoints.commit_timeout) == ("30s", "5m")
    assert (spec.cells, spec.checkpoints.cell_order) == (3, "Together")
    assert spec.scale_down.drain_timeout == "0s"
    assert spec.checkpoints.restart_blockers_after == 0
    assert spec.s3 is not None and spec.s3.document() == {
        "bucket": "bucket",
        "prefix": "a/b",
        "endpoint": "http://s3:9000",
        "region": "eu-west-1",
        "addressingStyle": "path",
        "credentialsSecret": "keys",
    }
    assert (spec.recovery.policy, spec.recovery.backoff_limit, spec.suspend) == ("Restart", 9, True)
    assert spec.recovery.max_checkpoint_age == "2h"
    assert spec.access.driver_selector is not None
    assert (spec.access.driver_selector.match_labels, spec.access.attempt_floor) == ({"app": "trainer"}, False)


INFERENCE = {"vllm": {"image": "vllm:1", "model": "Qwen/Qwen3-8B", "args": ["--seed=1"], "claim": "models"}}
SERVED = [{name: part for name, part in server.items() if name != "config"} for server in SERVERS]


def test_an_engine_s_block_arrives(render: Render) -> None:
    spec = spec_of(render(CHART, {"servers": SERVED, "s3.bucket": "bucket", "inference": INFERENCE}))
    assert spec.inference is not None
    assert (spec.inference.vllm.args, spec.inference.vllm.claim) == (["--seed=1"], "models")


def test_others_that_may_reach_the_engine_are_named(render: Render) -> None:
    trainer = {"podSelector": {"matchLabels": {"app": "trainer"}}}
    values = {"servers": SERVED, "s3.bucket": "bucket", "inference": INFERENCE}
    objects = render(CHART, {**values, "networkPolicy": {"engineFrom": [trainer]}})
    policy = objects["NetworkPolicy", "rel-engine-callers"]["spec"]
    stack = StackContext(StackIdentity(namespace="team", name="rel", uid="u"), spec_of(objects), "gym-system")
    (engine,) = [child for child in build_children(stack) if child["kind"] == "Deployment"]
    labels = engine["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    (rule,) = policy["ingress"]
    (port,) = engine["spec"]["template"]["spec"]["containers"][0]["ports"]
    assert (rule["from"], rule["ports"][0]["port"]) == ([trainer], port["name"])


def test_credentials_are_created_named_or_left_to_a_role(render: Render) -> None:
    created = render(CHART, {**DEMO, "s3.accessKeyId": "id", "s3.secretAccessKey": "key"})
    assert created["Secret", "rel-s3"]["stringData"] == {
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "key",
    }
    s3 = spec_of(created).s3
    assert s3 is not None and s3.credentials_secret == "rel-s3"

    role = render(
        CHART, {**DEMO, "serviceAccount": {"create": True, "annotations": {"eks.amazonaws.com/role-arn": "arn"}}}
    )
    assert not [name for kind, name in role if kind == "Secret"]
    assert spec_of(role).service_account_name == "rel"
    account = role["ServiceAccount", "rel"]
    assert account["metadata"]["annotations"] == {"eks.amazonaws.com/role-arn": "arn"}
    assert account["automountServiceAccountToken"] is False


def test_the_test_pod_may_reach_the_environment(render: Render) -> None:
    objects = render(CHART, {"servers": SERVERS, "s3.bucket": "bucket"})
    pod = objects["Pod", "rel-test"]
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (container,) = pod["spec"]["containers"]
    url = container["env"][0]["value"]
    stack = StackContext(StackIdentity(namespace="team", name="rel", uid="u"), spec_of(objects), "gym-system")
    children = {(m["kind"], m["metadata"]["name"]): m for m in build_children(stack)}
    service = children["Service", url.removeprefix("http://").split(":")[0]]
    assert service["metadata"]["labels"]["gymops.dev/server"] == "world"
    ingress = children["NetworkPolicy", "rel-servers"]["spec"]["ingress"]
    (data,) = [rule for rule in ingress if rule["ports"][0]["port"] == "data"]
    (source,) = data["from"]
    assert source["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    # It must not be taken for a server: services select by UID.
    assert not service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    compile(container["args"][0], "test", "exec")


def test_pods_are_restricted(render: Render, assert_restricted: Callable[..., None]) -> None:
    assert_restricted(render(CHART, DEMO))


def test_an_upgrade_of_the_chart_does_not_replace_the_journal(render: Render) -> None:
    labels = render(CHART, DEMO)["Deployment", "rel-journal"]["spec"]["template"]["metadata"]["labels"]
    assert not {"helm.sh/chart", "app.kubernetes.io/version"} & labels.keys()


def test_rendering_again_causes_no_drift_and_asks_for_no_checkpoint(render: Render) -> None:
    values = {**DEMO, "schedule.enabled": True}
    first = render(CHART, values)
    assert render(CHART, values) == first
    assert not [kind for kind, _ in first if kind in ("GymCheckpoint", "GymRestore")]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"s3.bucket": "bucket"}, "a stack needs servers"),
        ({"demo.enabled": True}, "checkpoints need a place: set s3.bucket"),
        (
            {
                "demo.enabled": True,
                "checkpoints.enabled": False,
                "collection": {"tasks": "s3://bkt/t", "output": "s3://bkt/o"},
            },
            "set s3.bucket",
        ),
        ({**DEMO, "s3.accessKeyId": "id"}, "belong together"),
        ({**DEMO, "s3.accessKeyId": "i", "s3.secretAccessKey": "k", "s3.existingSecret": "e"}, "not both"),
        ({**DEMO, "collection": {"tasks": "s3://bkt/t"}}, "output"),
        ({**DEMO, "collection": {"tasks": "t", "output": "/rows"}}, "output"),
        ({**DEMO, "cells": 65}, "cells"),
        ({**DEMO, "checkpoints.cellOrder": "Any"}, "cellOrder"),
        ({**DEMO, "demo.tokensPerSecond": 0}, "tokensPerSecond"),
        ({**DEMO, "servers": [{**SERVERS[0], "replicas": 2}]}, "replicas"),
        ({**DEMO, "inference": {"vllm": {"image": "vllm:1"}}}, "model"),
    ],
)
def test_refusals_say_what_to_set(
    refuse: Callable[[str, dict[str, Any]], str], values: dict[str, Any], says: str
) -> None:
    assert says in refuse(CHART, values)


def test_a_refusal_does_not_show_a_secret(refuse: Callable[[str, dict[str, Any]], str]) -> None:
    assert "hunter2" not in refuse(CHART, {**DEMO, "s3.secretAccessKey": "hunter2"})


# ---- storage ------------------------------------------------------------------------------------------------


def test_encryption_and_authorities_arrive(render: Render) -> None:
    s3 = {"bucket": "bucket", "endpoint": "https://s3:9000", "caSecret": "ca"}
    kms = {**s3, "encryption": {"type": "SSE-KMS", "kmsKeyID": "alias/gym"}}
    found = spec_of(render(CHART, {"servers": SERVERS, "s3": kms})).s3
    assert found is not None and found.ca_secret == "ca"
    assert found.document()["encryption"] == {"type": "SSE-KMS", "kmsKeyID": "alias/gym"}
    plain = spec_of(render(CHART, {"servers": SERVERS, "s3": {**s3, "encryption": {"type": "SSE-S3"}}})).s3
    assert plain is not None and plain.document()["encryption"] == {"type": "SSE-S3"}
    nothing = spec_of(render(CHART, {"servers": SERVERS, "s3": s3})).s3
    assert nothing is not None and nothing.encryption is None


@pytest.mark.parametrize(
    ("bucket", "says"),
    [
        ("bucket/team/run", "set s3.bucket=bucket and s3.prefix=team/run"),
        ("bucket/", "set s3.bucket=bucket and s3.prefix="),
        ("s3://bucket/run", "set s3.bucket=bucket and s3.prefix=run"),
        ("s3://bucket", "set s3.bucket=bucket and s3.prefix="),
    ],
)
def test_s5_a_bucket_with_a_slash_is_refused_with_what_to_write(
    refuse: Callable[[str, dict[str, Any]], str], bucket: str, says: str
) -> None:
    assert says in refuse(CHART, {"servers": SERVERS, "s3.bucket": bucket})


# ---- schedule -----------------------------------------------------------------------------------------------

STACK = {"servers": SERVERS, "s3.bucket": "bucket"}


def test_a_schedule_is_made_when_asked_for(render: Render) -> None:
    assert not [kind for kind, _ in render(CHART, STACK) if kind == "GymCheckpointSchedule"]
    schedule = render(CHART, {**STACK, "schedule.enabled": True})["GymCheckpointSchedule", "rel"]
    assert schedule["spec"] == {
        "every": "10m",
        "suspend": False,
        "concurrencyPolicy": "Forbid",
        "keep": {"last": 10, "failed": 3},
        "template": {"spec": {"stackRef": {"name": "rel"}}},
    }


def test_all_values_of_a_schedule_arrive(render: Render) -> None:
    values = {
        "enabled": True,
        "every": "",
        "cron": "0 3 * * *",
        "timeZone": "Europe/Berlin",
        "suspend": True,
        "startingDeadline": "5m",
        "keep": {"last": 2, "maxAge": "7d", "failed": 1},
        "checkpoint": {"deletionPolicy": "Delete", "labels": {"by": "night"}},
    }
    spec = render(CHART, {**STACK, "schedule": values})["GymCheckpointSchedule", "rel"]["spec"]
    assert spec == {
        "schedule": "0 3 * * *",
        "timeZone": "Europe/Berlin",
        "suspend": True,
        "concurrencyPolicy": "Forbid",
        "startingDeadline": "5m",
        "keep": {"last": 2, "maxAge": "7d", "failed": 1},
        "template": {"spec": {"stackRef": {"name": "rel"}, "deletionPolicy": "Delete", "labels": {"by": "night"}}},
    }


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        ({"enabled": True, "cron": "0 3 * * *"}, "set either schedule.every"),
        ({"enabled": True, "every": ""}, "a schedule needs its times"),
        ({"enabled": True, "timeZone": "UTC"}, "schedule.timeZone is for schedule.cron"),
        ({"enabled": True, "every": "10"}, "every"),
        ({"enabled": True, "cron": "0 3 *", "every": ""}, "cron"),
        ({"enabled": True, "keep": {"first": 1}}, "keep"),
    ],
)
def test_a_schedule_that_cannot_be_kept_is_refused(
    refuse: Callable[[str, dict[str, Any]], str], schedule: dict[str, Any], says: str
) -> None:
    assert says in refuse(CHART, {**STACK, "schedule": schedule})


def test_a_schedule_without_checkpoints_is_refused(refuse: Callable[[str, dict[str, Any]], str]) -> None:
    assert "schedule.enabled needs checkpoints" in refuse(
        CHART, {**STACK, "checkpoints.enabled": False, "schedule.enabled": True}
    )


# ---- pods ---------------------------------------------------------------------------------------------------


def test_servers_without_resources_of_their_own_get_the_common_ones(render: Render) -> None:
    own = {"requests": {"cpu": "2"}}
    common = {"requests": {"cpu": "100m"}, "limits": {"memory": "1Gi"}}
    servers = [{**SERVERS[0], "resources": own}, *SERVERS[1:]]
    spec = spec_of(render(CHART, {**STACK, "servers": servers, "serverResources": common}))
    found = {server.name: server.document().get("resources") for server in spec.servers}
    assert found == {"world": own, "policy": common, "agent": common, "tools": common}
    assert all(server.resources is None for server in spec_of(render(CHART, STACK)).servers)
    demo = spec_of(render(CHART, {**DEMO, "serverResources": common}))
    assert [server.document().get("resources") for server in demo.servers] == [common] * 4


def stack_pods(objects: Objects) -> dict[str, dict[str, str]]:
    """Labels of the pods that the operator would make, by server."""
    stack = StackContext(StackIdentity(namespace="team", name="rel", uid="u"), spec_of(objects), "gym-system")
    return {
        child["metadata"]["name"]: child["spec"]["template"]["metadata"]["labels"]
        for child in build_children(stack)
        if child["kind"] == "StatefulSet"
    }


def test_others_may_reach_data_ports_where_they_are_named(render: Render) -> None:
    assert not [kind for kind, _ in render(CHART, STACK) if kind == "NetworkPolicy"]
    trainer = {"podSelector": {"matchLabels": {"app": "trainer"}}}
    objects = render(CHART, {**STACK, "networkPolicy.dataFrom": [trainer]})
    spec = objects["NetworkPolicy", "rel-data"]["spec"]
    assert spec["ingress"] == [{"ports": [{"protocol": "TCP", "port": "data"}], "from": [trainer]}]
    for labels in stack_pods(objects).values():
        assert spec["podSelector"]["matchLabels"].items() <= labels.items()
    off = {**STACK, "networkPolicy.dataFrom": [trainer], "networkPolicy.enabled": False}
    assert ("NetworkPolicy", "rel-data") not in render(CHART, off)


def test_the_demo_s_programs_are_for_the_stack_alone(render: Render) -> None:
    objects = render(CHART, DEMO)
    spec = objects["NetworkPolicy", "rel-demo"]["spec"]

    def selected(selector: dict[str, Any], labels: dict[str, str]) -> bool:
        fits = selector.get("matchLabels", {}).items() <= labels.items()
        return fits and all(labels.get(e["key"]) in e["values"] for e in selector.get("matchExpressions", ()))

    programs = {
        name: objects["Deployment", f"rel-{name}"]["spec"]["template"]["metadata"]["labels"]
        for name in ("engine", "journal")
    }
    assert all(selected(spec["podSelector"], labels) for labels in programs.values())
    peers = [peer["podSelector"] for peer in spec["ingress"][0]["from"]]
    for labels in stack_pods(objects).values():
        assert not selected(spec["podSelector"], labels), "the stack's own pods have a policy of their own"
        assert any(selected(peer, labels) for peer in peers)
    assert any(selected(peer, programs["engine"]) for peer in peers), "the engine writes the journal"
    assert not any(selected(peer, {"app": "stranger"}) for peer in peers)


def test_every_value_is_documented_and_in_the_schema() -> None:
    assert_documented(Path(__file__).parents[2] / "charts" / CHART)
