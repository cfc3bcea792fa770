"""From a pydantic type's JSON schema to the structural schema that a CRD must have.

A structural schema is a subset: no references, no `additionalProperties: false` (the API server prunes), no
`null` alternatives, no titles. What is lost by that is checked by the type itself when the operator reads the
object.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gym_servers.stack.wire import CLUSTER_REQUIRED, LOCAL_ONLY, RULES, WireModel

_DROPPED = {"title", "$defs", "propertyNames", *LOCAL_ONLY, *CLUSTER_REQUIRED}


def structural_schema(model: type[WireModel], *, defaults: bool = True) -> dict[str, Any]:
    """The structural schema of a type, with or without its default values.

    A status gets none: what nobody observed must not appear in it. Raises ValueError for a construct that no
    CRD can hold.
    """
    schema = model.model_json_schema(by_alias=True, mode="validation")
    return _Converter(schema.get("$defs", {}), defaults).convert(schema)


@dataclass(frozen=True)
class _Converter:
    definitions: dict[str, Any]
    defaults: bool

    def convert(self, node: dict[str, Any]) -> dict[str, Any]:
        node = _inlined(_without_null(node), self.definitions)
        out = {key: node[key] for key in sorted(node, key=_order) if key not in _DROPPED}
        if not self.defaults or out.get("default") is None:
            out.pop("default", None)
        if isinstance(out.get("description"), str):
            out["description"] = " ".join(out["description"].split())
        if "const" in out:
            out["enum"] = [out.pop("const")]
        if "exclusiveMinimum" in out or "exclusiveMaximum" in out:
            raise ValueError("exclusive bounds are written differently in a CRD: use ge and le")
        if "x-kubernetes-int-or-string" in out:
            return out  # its anyOf is the one form that Kubernetes expects there
        if "anyOf" in out:
            raise ValueError(f"a CRD cannot hold a choice of types: {out['anyOf']}")
        if "items" in out:
            out["items"] = self.convert(out["items"])
            if "description" in out:  # kubectl explain would put the two together
                out["items"].pop("description", None)
        extra = out.pop("additionalProperties", None)
        if "properties" in out:
            self._convert_properties(out)
        elif isinstance(extra, dict):
            out["additionalProperties"] = self.convert(extra)
        return out

    def _convert_properties(self, out: dict[str, Any]) -> None:
        fields = {name: field for name, field in out["properties"].items() if not _has(field, LOCAL_ONLY)}
        demanded = {name for name, field in fields.items() if _has(field, CLUSTER_REQUIRED)}
        required = [name for name in fields if name in demanded or name in out.get("required", [])]
        out.pop("required", None)
        if required:
            out["required"] = required
        out["properties"] = {name: self.convert(field) for name, field in fields.items()}


def _inlined(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """The node with its reference replaced by what it refers to; what stands beside a reference wins."""
    if "$ref" not in node:
        return node
    target = _inlined(definitions[node["$ref"].removeprefix("#/$defs/")], definitions)
    rules = [*target.get(RULES, []), *node.get(RULES, [])]
    merged = {**target, **{key: value for key, value in node.items() if key != "$ref"}}
    return {**merged, RULES: rules} if rules else merged


def _without_null(node: dict[str, Any]) -> dict[str, Any]:
    """An optional field: absent in a CRD rather than null."""
    choices = [choice for choice in node.get("anyOf", []) if choice.get("type") != "null"]
    if len(choices) != 1:
        return node
    beside = {key: value for key, value in node.items() if key != "anyOf"}
    return {**choices[0], **beside}


def _order(key: str) -> tuple[int, str]:
    """What a reader looks for comes first: what it is, then its bounds, then what is inside."""
    places = {"description": 0, "type": 1, "default": 2, "properties": 4, "items": 4}
    return places.get(key, 3), key


def _has(field: dict[str, Any], mark: dict[str, bool]) -> bool:
    return mark.keys() <= field.keys()
