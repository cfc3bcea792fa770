"""The base of every type that users write or read as YAML, and the marks the CRD generator understands.

A type is written once, in Python; its JSON schema becomes the CRD. What JSON schema cannot say (cross-field
rules, map-like lists, free objects) is attached here in Kubernetes' own terms, and validated a second time by
the type itself for the local runner, which has no API server in front of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticCustomError, core_schema

LABEL_PATTERN: Final = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
"""Names become Services, which must begin with a letter (RFC 1035); so do ours."""

LABEL_HINT: Final = "use lower-case letters, digits and dashes, beginning with a letter"

LOCAL_ONLY: Final = {"x-gymops-local-only": True}
"""Marks a field that only the local runner honours; the CRD does not have it."""

CLUSTER_REQUIRED: Final = {"x-gymops-cluster-required": True}
"""Marks a field that the local runner can do without and the cluster cannot."""

FREE_OBJECT: Final = {"x-kubernetes-preserve-unknown-fields": True}
"""Marks an object whose keys belong to somebody else."""

RULES: Final = "x-kubernetes-validations"


class WireModel(BaseModel):
    """camelCase in documents, snake_case in Python, no unknown field. A docstring under a field is its
    description in `kubectl explain`."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )

    def document(self) -> dict[str, Any]:
        """The JSON form: camelCase, absent fields left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def with_rules(*rules: dict[str, Any]) -> ConfigDict:
    """The configuration of a type that carries CEL rules."""
    return ConfigDict(json_schema_extra={RULES: list(rules)})


def rule(expression: str, message: str) -> dict[str, Any]:
    """A CEL rule of the API server; `message` says what to write instead."""
    return {"rule": expression, "message": message}


def list_map(*keys: str) -> dict[str, Any]:
    """A list whose items are told apart by `keys`: no duplicates, and several writers merge item by item."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


@dataclass(frozen=True, eq=False)  # annotations must be hashable, and rules are not
class Checked:
    """Annotation of a text: `check` raises ValueError with a message that says what to write instead; `rules`
    say the same to the API server.

    Rules and not JSON schema's own `pattern`, because a refusal that only shows a regular expression does not
    help anybody.
    """

    check: Callable[[str], object]
    rules: tuple[dict[str, Any], ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        inner = handler(schema)
        return {**inner, RULES: [*inner.get(RULES, ()), *self.rules]}

    def _checked(self, text: str) -> str:
        try:
            self.check(text)
        except ValueError as error:
            raise PydanticCustomError("checked", "{hint}", {"hint": str(error)}) from None
        return text


def matches(pattern: str, hint: str) -> Checked:
    """The text must match all of `pattern`; `hint` says what to write instead."""

    def check(text: str) -> None:
        if not re.fullmatch(pattern, text):
            raise ValueError(hint)

    return Checked(check, (rule(f"self.matches(r'{pattern}')", hint),))
