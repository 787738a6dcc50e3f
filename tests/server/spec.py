"""The REST API's description, and checking what a server says against it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

import jupyter_gpu_ckpt

PATH = Path(jupyter_gpu_ckpt.__file__).parent / "openapi.yaml"
METHODS = ("get", "post", "put", "patch", "delete")


@cache
def document() -> dict[str, Any]:
    return dict(yaml.safe_load(PATH.read_text()))


def resolve(node: dict[str, Any]) -> dict[str, Any]:
    """Follow a reference within the document."""
    while "$ref" in node:
        target: Any = document()
        for key in node["$ref"].removeprefix("#/").split("/"):
            target = target[key]
        node = target
    return node


def match(method: str, path: str) -> dict[str, Any]:
    """Return the described operation for a request to `path` (below ``/gpu-ckpt/api``)."""
    for template, item in document()["paths"].items():
        pattern = re.sub(r"\{\w+\}", "[^/]+", template)
        if re.fullmatch(pattern, path) and method.lower() in item:
            return dict(item[method.lower()])
    raise AssertionError(f"{method} {path} is not in openapi.yaml")


def check(method: str, path: str, status: int, body: Any) -> None:
    """Fail unless the description allows this answer to this request."""
    responses = match(method, path)["responses"]
    assert str(status) in responses, f"{method} {path}: {status} is not described ({body})"
    response = resolve(responses[str(status)])
    if "content" not in response:
        assert body is None, f"{method} {path}: {status} has a body: {body}"
        return
    schema = response["content"]["application/json"]["schema"]
    # The components come along, so that references inside the schema resolve.
    whole = {**schema, "components": document()["components"]}
    errors = list(Draft202012Validator(whole).iter_errors(body))
    assert not errors, f"{method} {path}: {errors[0].message} in {body}"
    unknown = _unknown(schema, body)
    assert not unknown, f"{method} {path}: not described: {unknown}"


def _unknown(schema: dict[str, Any], value: Any, where: str = "") -> list[str]:
    """Fields that the answer has and the description lacks."""
    schema = resolve(schema)
    if value is None:
        return []
    if "anyOf" in schema:
        choices = [c for c in schema["anyOf"] if resolve(c).get("type") != "null"]
        return _unknown(choices[0], value, where)
    if isinstance(value, list):
        return [found for entry in value for found in _unknown(schema["items"], entry, where)]
    if isinstance(value, dict):
        if isinstance(each := schema.get("additionalProperties"), dict):  # a map: any name will do
            return [found for name in value for found in _unknown(each, value[name], f"{where}.*")]
        properties = schema.get("properties", {})
        missing = [f"{where}.{name}" for name in value if name not in properties]
        return missing + [
            found
            for name in value
            if name in properties
            for found in _unknown(properties[name], value[name], f"{where}.{name}")
        ]
    return []
