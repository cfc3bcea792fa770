"""The CRDs: fresh, structural, and complete in what Kubernetes and its users expect of a kind."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gym_operator import crds
from gym_operator.api.checkpoint import MUTABLE
from gym_operator.api.conditions import ConditionType
from gym_operator.structural import structural_schema
from gym_servers.stack.wire import WireModel

ROOT = Path(__file__).parents[3]


def test_generated_files_are_fresh() -> None:
    assert crds.stale(ROOT) == [], "run python -m gym_operator.crds"


def test_stale_files_are_found(tmp_path: Path) -> None:
    assert set(crds.stale(tmp_path)) == set(crds.files())


def version(kind: crds.Kind) -> dict[str, Any]:
    (only,) = crds.crd(kind)["spec"]["versions"]
    return dict(only)


def nodes(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every schema inside a schema, itself included."""
    yield schema
    for inner in schema.get("properties", {}).values():
        yield from nodes(inner)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from nodes(schema[key])


STEP = re.compile(r"""\.(\w+)|\[\d+\]|\[\?\(@\.(\w+)=="(\w+)"\)\]""")
OWN_METADATA = {"properties": {"creationTimestamp": {"type": "string"}}}
SHOWN_AS = {"string": {"string"}, "date": {"string"}, "integer": {"integer"}, "number": {"number", "integer"}}


def at(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """The schema of what a JSONPath leads to. AssertionError where that can never be there."""
    place = {**schema, "properties": {**schema["properties"], "metadata": OWN_METADATA}}
    rest = path
    while rest:
        step = STEP.match(rest)
        assert step is not None, f"{path}: {rest} is not understood"
        field, key, value = step.groups()
        place = place if field else place["items"]
        name = field or key
        assert name is None or name in place["properties"], f"{path}: there is no {name}"
        assert key is None or (key, value) in {("type", kind) for kind in ConditionType}, f"{path}: {value} is never"
        place = place["properties"][field] if field else place
        rest = rest[step.end() :]
    return place


@pytest.mark.parametrize("kind", crds.KINDS, ids=lambda kind: kind.kind)
class TestEveryKind:
    def test_is_structural(self, kind: crds.Kind) -> None:
        forbidden = {"$ref", "$defs", "title", "propertyNames", "const", "nullable", "exclusiveMinimum"}
        for node in nodes(version(kind)["schema"]["openAPIV3Schema"]):
            assert not forbidden & node.keys()
            assert node.get("additionalProperties") is not False
            assert "type" in node or "x-kubernetes-int-or-string" in node
            assert not any(key.startswith("x-gymops") for key in node)

    def test_describes_a_list_once(self, kind: crds.Kind) -> None:
        """kubectl explain puts the description of a list and that of its items together, as if they were one text."""
        lists = [n for n in nodes(version(kind)["schema"]["openAPIV3Schema"]) if n.get("type") == "array"]
        assert lists
        assert [node for node in lists if ("description" in node) == ("description" in node["items"])] == []

    def test_bounds_every_text_list_and_map_of_its_spec(self, kind: crds.Kind) -> None:
        for node in nodes(version(kind)["schema"]["openAPIV3Schema"]["properties"]["spec"]):
            if node.get("type") == "string":
                assert node.keys() & {"maxLength", "enum"}
            if node.get("type") == "array":
                assert "maxItems" in node
            if node.get("type") == "object" and "properties" not in node:
                assert "maxProperties" in node

    def test_describes_every_field(self, kind: crds.Kind) -> None:
        schema = version(kind)["schema"]["openAPIV3Schema"]["properties"]
        for part in ("spec", "status"):
            for node in nodes(schema[part]):
                for name, field in node.get("properties", {}).items():
                    assert field.get("description"), f"{kind.kind}.{part}: {name} has no description"

    def test_k14_has_a_status_that_says_not_looked_at(self, kind: crds.Kind) -> None:
        assert version(kind)["subresources"] == {"status": {}}
        status = version(kind)["schema"]["openAPIV3Schema"]["properties"]["status"]
        assert status["default"] == {"observedGeneration": -1}
        # Nothing else: a default inside would put claims into a status nobody wrote.
        assert not any("default" in node for node in nodes(status) if node is not status)

    def test_has_conditions_that_several_writers_can_merge(self, kind: crds.Kind) -> None:
        conditions = version(kind)["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]["conditions"]
        assert conditions["x-kubernetes-list-type"] == "map"
        assert conditions["x-kubernetes-list-map-keys"] == ["type"]

    def test_has_names_and_columns(self, kind: crds.Kind) -> None:
        spec = crds.crd(kind)["spec"]
        assert spec["names"]["categories"] == ["gym"]
        assert spec["names"]["shortNames"] in (["gstack"], ["gckpt"], ["gsched"], ["grst"])
        columns = [column["name"] for column in version(kind)["additionalPrinterColumns"]]
        assert "Phase" in columns and columns[-1] == "Age"

    def test_has_columns_of_what_there_is(self, kind: crds.Kind) -> None:
        """A path that leads nowhere is no error: its column stays empty."""
        for column in version(kind)["additionalPrinterColumns"]:
            shown = at(version(kind)["schema"]["openAPIV3Schema"], column["jsonPath"])
            assert shown["type"] in SHOWN_AS[column["type"]], column

    def test_rules_have_messages(self, kind: crds.Kind) -> None:
        rules = [
            rule
            for node in nodes(version(kind)["schema"]["openAPIV3Schema"])
            for rule in node.get("x-kubernetes-validations", [])
        ]
        assert rules
        assert all(rule["message"] for rule in rules)


def stack_spec_schema() -> dict[str, Any]:
    schema: dict[str, Any] = version(crds.KINDS[0])["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return schema


def test_a_default_is_described_of_the_engine() -> None:
    """kubectl explain does not show defaults themselves."""
    fields = stack_spec_schema()["properties"]["inference"]["properties"]["vllm"]["properties"]
    told = {name: field["default"] for name, field in fields.items() if "default" in field}
    assert told == {"imagePullPolicy": "IfNotPresent", "replicas": 1, "cutAtEngine": False}
    for name, default in told.items():
        text = json.dumps(default).strip('"')
        assert fields[name]["description"].endswith(f"; {text} if not given.")


def test_the_cluster_demands_an_image_and_knows_no_directory() -> None:
    spec = stack_spec_schema()
    assert set(spec["required"]) == {"image", "servers", "checkpoints"}
    storage = spec["properties"]["checkpoints"]["properties"]["storage"]
    assert list(storage["properties"]) == ["s3"]


def test_a_server_s_config_is_free() -> None:
    config = stack_spec_schema()["properties"]["servers"]["items"]["properties"]["config"]
    assert config["x-kubernetes-preserve-unknown-fields"] is True


def test_a_checkpoint_never_changes_but_for_how_it_is_kept() -> None:
    spec = version(crds.KINDS[1])["schema"]["openAPIV3Schema"]["properties"]["spec"]
    (rule,) = (each["rule"] for each in spec["x-kubernetes-validations"] if "oldSelf" in each["rule"])
    for field in spec["properties"]:
        changes = f"self.{field} == oldSelf.{field}" not in rule or f"has(self.{field}) == has(oldSelf" not in rule
        assert changes == (field in MUTABLE)


def test_the_chart_s_crd_is_the_same_but_for_its_metadata() -> None:
    for kind in crds.KINDS:
        text = crds.files()[f"charts/gym-operator/templates/crds/{kind.plural}.yaml"]
        plain = "\n".join(line for line in text.splitlines() if "{{" not in line)
        assert yaml.safe_load(plain)["spec"] == crds.crd(kind)["spec"]


def test_a_choice_of_types_is_refused() -> None:
    class Choice(WireModel):
        value: int | str

    with pytest.raises(ValueError, match="cannot hold a choice"):
        structural_schema(Choice)
