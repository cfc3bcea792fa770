"""The engine of a stack's inference block: its manifests, what the servers are told of it, and what its pods mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gym_operator.api import names
from gym_operator.api.stack import GymStack
from gym_operator.rules.cell_status import Verdict
from gym_operator.rules.engine_state import engine_told, with_engine
from gym_operator.rules.observed import Engine
from gym_operator.rules.pod_state import NO_CELL, PodState, observe
from gym_operator.rules.spec_check import check_stack
from gym_operator.rules.workloads import Manifest, StackContext, build_children
from gym_servers.model.config import VllmConfig
from gym_servers.stack.render import cell_folder, checkpoint_root
from gym_servers.stack.settings import S3Settings
from gym_servers.stack.spec import SpecError, parse_spec

Build = Callable[[dict[str, Any]], StackContext]
VLLM: dict[str, Any] = {"image": "vllm/vllm-openai:v1", "model": "Qwen/Qwen3-8B"}


def with_vllm(document: dict[str, Any], **changes: Any) -> dict[str, Any]:
    document["servers"][1]["config"] = {}
    document["inference"] = {"vllm": {**VLLM, **changes}}
    return document


def by_name(manifests: tuple[Manifest, ...], name: str) -> dict[str, Manifest]:
    return {m["kind"]: m for m in manifests if m["metadata"]["name"] == name}


@pytest.fixture
def built(context: Build, spec_document: dict[str, Any]) -> Callable[..., dict[str, Manifest]]:
    """The engine's manifests by kind."""

    def build(*, running: bool = True, **changes: Any) -> dict[str, Manifest]:
        stack = context(with_vllm(spec_document, **changes))
        return by_name(build_children(stack, running=running), "demo-vllm")

    return build


def container(found: dict[str, Manifest]) -> dict[str, Any]:
    (only,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    return dict(only)


def policy_config(context: StackContext) -> dict[str, Any]:
    (config,) = [child for child in build_children(context) if child["kind"] == "ConfigMap"]
    found: dict[str, Any] = json.loads(config["data"]["policy.json"])["config"]
    return found


def test_without_the_block_there_is_no_engine(context: Build, spec_document: dict[str, Any]) -> None:
    children = build_children(context(spec_document))
    assert not by_name(children, "demo-vllm")
    assert "Deployment" not in {child["kind"] for child in children}


def test_it_is_a_deployment_a_service_and_a_policy(built: Callable[..., dict[str, Manifest]]) -> None:
    found = built(replicas=2, args=["--max-model-len=8192"], resources={"limits": {"nvidia.com/gpu": 1}})
    assert set(found) == {"Deployment", "Service", "NetworkPolicy"}
    spec, engine = found["Deployment"]["spec"], container(found)
    assert spec["replicas"] == 2
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert engine["command"] + engine["args"] == [
        *("vllm", "serve", "Qwen/Qwen3-8B", "--host=0.0.0.0", "--port=8000", "--max-model-len=8192"),
    ]
    assert engine["resources"] == {"limits": {"nvidia.com/gpu": 1}}
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    assert found["Service"]["spec"]["selector"].items() <= labels.items()
    assert [port["port"] for port in found["Service"]["spec"]["ports"]] == [8000]
    assert built(running=False)["Deployment"]["spec"]["replicas"] == 0


def test_an_engine_that_cuts_is_one_process_whatever_its_ranks(built: Callable[..., dict[str, Manifest]]) -> None:
    """vLLM has one for each data-parallel rank by default, and a cut reaches one of them alone."""
    ranks = ["--data-parallel-size=2"]
    assert "--api-server-count=1" in container(built(cutAtEngine=True, args=ranks))["args"]
    assert container(built(args=ranks))["args"][3:] == ranks


def test_a_model_has_an_hour_to_load_and_an_engine_that_fails_is_restarted(
    built: Callable[..., dict[str, Manifest]],
) -> None:
    engine = container(built())
    startup = engine["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 3600
    assert {engine[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")} == {
        "/health"
    }


@pytest.mark.parametrize("cuts", [False, True])
def test_its_pods_meet_the_restricted_standard(built: Callable[..., dict[str, Manifest]], cuts: bool) -> None:
    found = built(cutAtEngine=cuts, claim="models")
    pod, engine = found["Deployment"]["spec"]["template"]["spec"], container(found)
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 65532
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert engine["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False)
    writable = {mount["mountPath"] for mount in engine["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/tmp", "/dev/shm", "/models"}
    assert {mount["name"] for mount in engine["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_only_the_model_server_may_reach_it(context: Build, spec_document: dict[str, Any]) -> None:
    children = build_children(context(with_vllm(spec_document)))
    (rule,) = by_name(children, "demo-vllm")["NetworkPolicy"]["spec"]["ingress"]
    assert [port["port"] for port in rule["ports"]] == ["engine"]
    (source,) = rule["from"]
    allowed = source["podSelector"]["matchLabels"]
    pods = {
        c["metadata"]["name"]: c["spec"]["template"] for c in children if c["kind"] in ("StatefulSet", "Deployment")
    }
    able = {name for name, pod in pods.items() if allowed.items() <= pod["metadata"]["labels"].items()}
    assert able == {"demo-policy"}
    # The servers' own policy selects the engine too, and opens ports of other names only.
    servers = by_name(children, "demo-servers")["NetworkPolicy"]["spec"]["ingress"]
    assert "engine" not in {port["port"] for rule in servers for port in rule["ports"]}


def test_the_engine_may_not_call_the_servers(context: Build, spec_document: dict[str, Any]) -> None:
    children = build_children(context(with_vllm(spec_document)))
    servers = by_name(children, "demo-servers")["NetworkPolicy"]["spec"]["ingress"]
    (data,) = [rule for rule in servers if rule["ports"][0]["port"] == "data"]
    (excluded,) = data["from"][0]["podSelector"]["matchExpressions"]
    labels = by_name(children, "demo-vllm")["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert (excluded["operator"], labels[excluded["key"]] in excluded["values"]) == ("NotIn", True)


def test_no_service_of_a_server_selects_the_engine(context: Build, spec_document: dict[str, Any]) -> None:
    children = build_children(context(with_vllm(spec_document)))
    labels = by_name(children, "demo-vllm")["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selecting = [
        child["metadata"]["name"]
        for child in children
        if child["kind"] == "Service" and child["spec"]["selector"].items() <= labels.items()
    ]
    assert selecting == ["demo-vllm"]


def test_the_model_server_is_told_where_it_is(context: Build, spec_document: dict[str, Any]) -> None:
    found = policy_config(context(with_vllm(spec_document)))
    assert found == {"base_url": "http://demo-vllm:8000", "model": "Qwen/Qwen3-8B"}
    assert VllmConfig.model_validate(found)
    spec_document["servers"][1]["config"] = {"model": "mine", "tokenizer": "t"}
    named = policy_config(context(spec_document))
    assert named == {"base_url": "http://demo-vllm:8000", "model": "mine", "tokenizer": "t"}


def test_cuts_at_the_engine_share_storage_and_token(context: Build, spec_document: dict[str, Any]) -> None:
    stack = context(with_vllm(spec_document, cutAtEngine=True))
    found = by_name(build_children(stack), "demo-vllm")
    engine = container(found)
    assert "--middleware=gym_servers.worker.middleware.GenerationCut" in engine["args"]
    env = {entry["name"]: entry["value"] for entry in engine["env"]}
    storage = stack.spec.checkpoints.storage
    assert storage is not None
    # As the model server finds what was staged: below the storage, in the cell's folder.
    assert f"{env['GYM_CUT_STORAGE']}/{cell_folder(stack.identity, 0)}" == checkpoint_root(storage, stack.identity, 0)
    assert S3Settings.model_validate_json(env["GYM_CUT_S3"]).prefix == "team/run"
    mounts = {mount["name"]: mount["mountPath"] for mount in engine["volumeMounts"]}
    volumes = {
        v["name"]: v.get("secret", {}).get("secretName")
        for v in found["Deployment"]["spec"]["template"]["spec"]["volumes"]
    }
    assert env["GYM_CONTROL_TOKEN_FILE"] == f"{mounts['secrets']}/control-token"
    assert (volumes["secrets"], volumes["s3-credentials"]) == ("demo-control", "s3-keys")
    assert env["GYM_S3_CREDENTIALS_FOLDER"] == mounts["s3-credentials"]
    assert VllmConfig.model_validate(policy_config(stack)).cut_at_engine


def test_s4_an_engine_that_stages_in_the_bucket_trusts_its_authority(
    context: Build, spec_document: dict[str, Any]
) -> None:
    reach = {"endpoint": "https://minio:9000", "region": "RegionOne", "caSecret": "minio-ca"}
    spec_document["checkpoints"]["storage"]["s3"].update(reach)
    found = by_name(build_children(context(with_vllm(spec_document, cutAtEngine=True))), "demo-vllm")
    env = {entry["name"]: entry["value"] for entry in container(found)["env"]}
    settings = S3Settings.model_validate_json(env["GYM_CUT_S3"])
    assert (settings.endpoint, settings.region) == ("https://minio:9000", "RegionOne")
    (mount,) = [each for each in container(found)["volumeMounts"] if each["name"] == "s3-authorities"]
    assert env["GYM_S3_CA_FILE"] == f"{mount['mountPath']}/ca.crt"
    assert mount["readOnly"] is True and "subPath" not in mount, "a subPath is never brought up to date"
    volumes = found["Deployment"]["spec"]["template"]["spec"]["volumes"]
    (volume,) = [each for each in volumes if each["name"] == "s3-authorities"]
    assert volume["secret"]["secretName"] == "minio-ca"


def test_an_engine_without_cuts_gets_no_secret(built: Callable[..., dict[str, Manifest]]) -> None:
    found = built()
    assert not [v for v in found["Deployment"]["spec"]["template"]["spec"]["volumes"] if "secret" in v]
    assert not [entry for entry in container(found)["env"] if entry["name"].startswith("GYM_")]


def test_models_lie_at_one_place_for_engine_and_model_server(context: Build, spec_document: dict[str, Any]) -> None:
    children = build_children(context(with_vllm(spec_document, claim="models", secret="hub")))
    policy = by_name(children, "demo-policy")["StatefulSet"]["spec"]["template"]["spec"]
    engine = by_name(children, "demo-vllm")["Deployment"]["spec"]["template"]["spec"]
    for pod in (policy, engine):
        (process,) = pod["containers"]
        assert {"name": "models", "persistentVolumeClaim": {"claimName": "models"}} in pod["volumes"]
        assert {"name": "models", "mountPath": "/models"} in process["volumeMounts"]
        assert {"name": "HF_HOME", "value": "/models/.cache"} in process["env"]
        assert process["envFrom"] == [{"secretRef": {"name": "hub"}}]
    agent = by_name(children, "demo-agent")["StatefulSet"]["spec"]["template"]["spec"]
    assert "models" not in {volume["name"] for volume in agent["volumes"]}
    assert "envFrom" not in agent["containers"][0]


def test_nodes_with_devices_can_be_named(built: Callable[..., dict[str, Manifest]]) -> None:
    tolerations = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    pod = built(nodeSelector={"pool": "gpu"}, tolerations=tolerations)["Deployment"]["spec"]["template"]["spec"]
    assert (pod["nodeSelector"], pod["tolerations"]) == ({"pool": "gpu"}, tolerations)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s["servers"][1].update(server="scripted"), "is for a model server with server: vllm"),
        (lambda s: s["servers"][3].update(name="vllm"), "the name vllm belongs to the engine"),
        (lambda s: s["inference"]["vllm"].update(args=["--port=9"]), "leave --host, --port"),
        (lambda s: s["inference"]["vllm"].update(args=["--api_server_count", "2"]), "leave --host, --port"),
        (lambda s: s["inference"]["vllm"].update(args=["-asc", "2"]), "leave --host, --port"),
        (lambda s: s["inference"]["vllm"].update(args=["--port 9"]), "leave --host, --port"),
        (
            lambda s: s["inference"]["vllm"].update(args=["--seed=1", "--max-model-len 16384"]),
            "such as --max-model-len=16384",
        ),
        (lambda s: s["inference"]["vllm"].update(model="--trust"), "write a model's name"),
        (lambda s: s["inference"]["vllm"].update(cutAtEngine=True, replicas=2), "cutAtEngine needs replicas: 1"),
        (lambda s: s["inference"]["vllm"].pop("image"), "image: Field required"),
        (lambda s: s.pop("inference"), "where is the engine"),
        (
            lambda s: s["servers"][1].update(config={"base_url": "http://llm:8000"}),
            r"server policy .* leave config\.base_url out, or inference",
        ),
        (
            lambda s: (
                s["inference"]["vllm"].update(cutAtEngine=True),
                s.pop("collection"),
                s.update(checkpoints={"enabled": False}),
            ),
            "cutAtEngine is for checkpoints",
        ),
    ],
)
def test_refusals_say_what_to_write(
    spec_document: dict[str, Any], change: Callable[[dict[str, Any]], object], says: str
) -> None:
    change(with_vllm(spec_document))
    with pytest.raises(SpecError, match=says):
        parse_spec(spec_document)


@pytest.mark.parametrize(
    "args", [["--max-model-len", "16384"], ["--chat-template=a b"], ["--hf-overrides", '{"a": "-b c"}'], ["-tp=2"]]
)
def test_blanks_in_values_of_options_are_theirs(spec_document: dict[str, Any], args: list[str]) -> None:
    inference = parse_spec(with_vllm(spec_document, args=args)).inference
    assert inference is not None and inference.vllm.args == args


def test_the_example_is_a_whole_stack() -> None:
    body = yaml.safe_load((Path(__file__).parents[3] / "examples" / "vllm.yaml").read_text())
    body["metadata"] |= {"namespace": "team", "uid": "u"}
    stack = check_stack(body)
    assert isinstance(stack, GymStack), stack
    context = StackContext(stack.identity, stack.spec, "gym-system")
    assert VllmConfig.model_validate(policy_config(context)).base_url == "http://served-vllm:8000"


# ---- what its pods mean --------------------------------------------------------------------------------------


def pod(name: str = "demo-vllm-7d9f-24567", *, ready: bool = True, waiting: str = "") -> PodState:
    state = {"waiting": {"reason": waiting}} if waiting else {"running": {}}
    return observe(
        {
            "metadata": {
                "name": name,
                "namespace": "team",
                "uid": name,
                "labels": {names.SERVER_LABEL: names.ENGINE, names.COMPONENT_LABEL: names.ENGINE_COMPONENT},
            },
            "status": {
                "phase": "Pending" if waiting else "Running",
                "containerStatuses": [{"name": "server", "state": state}],
                "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            },
        }
    )


def test_a_pod_of_the_engine_is_in_no_cell_whatever_its_name() -> None:
    assert pod().cell == NO_CELL


@pytest.mark.parametrize(
    ("engine", "status", "says"),
    [
        (Engine(1, [pod()]), "True", "1 of 1 engines serve"),
        (Engine(2, [pod(), pod("b", ready=False)]), "True", "1 of 2 engines serve"),
        (Engine(1), "False", "0 of 1 engines serve: a model is loaded"),
        (Engine(1, [pod(ready=False)]), "False", "0 of 1 engines serve: a model is loaded"),
        (Engine(1, [pod(ready=False, waiting="ErrImagePull")]), "False", "0 of 1 engines serve; ErrImagePull"),
        (Engine(0), "False", "the stack has no pods now"),
    ],
)
def test_the_condition_says_what_is_waited_for(engine: Engine, status: str, says: str) -> None:
    told = engine_told(engine)
    assert told[0] == status
    assert told[2].startswith(says)


def test_a_stack_without_its_engine_is_not_ready_unless_it_is_done() -> None:
    runs = Verdict("Running", "Running", "True", "Running", "all servers are in service")
    done = Verdict("Completed", "Running", "True", "CollectionComplete", "all rollouts have their row")
    recovering = Verdict("Recovering", "Recovering", "False", "ParticipantDied", "agent is gone")
    nothing = Engine(1)
    found = with_engine(runs, nothing)
    assert (found.phase, found.ready, found.reason) == ("Running", "False", "EngineNotReady")
    assert with_engine(runs, Engine(1, [pod()])) == runs == with_engine(runs, None)
    assert with_engine(done, nothing) == done
    assert with_engine(recovering, nothing) == recovering
