"""The API's description is true: routes, verbs, models and reasons, both ways."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from openapi_spec_validator import validate
from tornado.web import RequestHandler

from jupyter_gpu_ckpt import errors, models
from jupyter_gpu_ckpt.handlers import default_handlers
from jupyter_gpu_ckpt.handlers.endings import EndingBody
from jupyter_gpu_ckpt.handlers.gc import GcBody
from jupyter_gpu_ckpt.handlers.kernels import SaveBody
from jupyter_gpu_ckpt.handlers.lost import LostBody
from jupyter_gpu_ckpt.handlers.states import MarkBody, RestoreBody
from jupyter_gpu_ckpt.handlers.unknown import UnknownPathHandler
from tests.server import spec

COMMENTS = ("title", "description", "examples", "default")


def test_is_valid_openapi() -> None:
    validate(spec.document())


def test_describes_every_route_and_verb_and_no_other() -> None:
    served = set()
    *handlers, (_, last) = default_handlers
    assert last is UnknownPathHandler
    for pattern, handler in handlers:
        path = re.sub(r"\(\?P<(\w+)>[^)]*\)", r"{\1}", pattern)
        path = path.removeprefix("/gpu-ckpt/api").removesuffix("/?")
        for method in spec.METHODS:
            if getattr(handler, method) is not getattr(RequestHandler, method):
                served.add((path, method))
    described = {
        (path, method)
        for path, item in spec.document()["paths"].items()
        for method in item
        if method in spec.METHODS
    }
    assert served == described


def plain(node: Any) -> Any:
    """A schema without its comments, in one spelling."""
    if isinstance(node, list):
        return [plain(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    node = {
        key: {name: plain(entry) for name, entry in value.items()}
        if key == "properties"
        else plain(value)
        for key, value in node.items()
        if key not in COMMENTS
    }
    if isinstance(node.get("type"), list):
        node = {"anyOf": [{"type": name} for name in node["type"]]}
    for key in ("enum", "required"):
        if key in node:
            node[key] = sorted(node[key])
    if not node.get("required", True):
        del node["required"]
    return node


def test_schemas_agree_with_the_models() -> None:
    kinds = [
        models.Kernel,
        models.State,
        models.Operation,
        models.LostKernel,
        models.Doctor,
        models.Ending,
        models.ErrorBody,
        models.AutoSaves,
        models.Contents,
        EndingBody,
        SaveBody,
        LostBody,
        MarkBody,
        RestoreBody,
        GcBody,
    ]
    _, expected = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    described = spec.document()["components"]["schemas"]
    for name, schema in expected.items():
        assert plain(described[name]) == plain(schema), name
    # Gc is a plain dict in the keeper; the API tests hold its answer against the description.
    assert set(described) == set(expected) | {"Gc"}


def test_lists_every_reason() -> None:
    body = spec.document()["components"]["schemas"]["ErrorBody"]
    assert set(body["properties"]["reason"]["examples"]) == set(errors.STATUS)
