"""The OpenAPI document: what FastAPI finds in the routes, how callers identify themselves, and what fields mean.

The docstring below a field of a model is its description. These docstrings are read from the sources only when the
document is requested, because reading them whenever a model is defined would delay every start of the server.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from atoll.server import problems
from atoll.server.middleware.auth import RUNTIME, SCHEMES
from atoll.server.routes.openapi_parts import PREFIX
from atoll.service.models.image_build import ImageBuildRequest

PUBLIC = frozenset({f"{PREFIX}/health", f"{PREFIX}/engine-events", f"{PREFIX}/webhooks/secrets"})
"""Operations that need no credential of a user."""
_OF_A_SANDBOX = (f"{PREFIX}/sandboxes/by-session-key", f"{PREFIX}/webhooks/{{sandbox_id}}/")
"""Operations that only the session key of a sandbox gives access to."""
_OF_FORMS = (ImageBuildRequest,)
"""Models of parts of forms, which routes read by themselves."""
_PACKAGES = ("atoll.model", "atoll.server", "atoll.service", "atoll.store")


def describe(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        document = FastAPI.openapi(app)
        document["components"]["securitySchemes"] = SCHEMES
        for path, operations in document["paths"].items():
            for operation in operations.values():
                if path not in PUBLIC:
                    bearer = [] if path.startswith(_OF_A_SANDBOX) else [{"bearer": list[str]()}]
                    other = "key" if path.startswith(RUNTIME) else "session"
                    operation["security"] = [*bearer, {other: []}]
                for status, answer in operation["responses"].items():
                    content = answer.get("content", {})
                    if status[0] in "45" and "application/json" in content:  # errors are problem+json and nothing else
                        answer["content"] = {problems.MEDIA_TYPE: content["application/json"]}
        document["components"]["schemas"] |= {model.__name__: _schema_of(model) for model in _OF_FORMS}
        _describe_fields(document["components"]["schemas"])
        app.openapi_schema = document
    return app.openapi_schema


def _schema_of(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)  # other operations have the same
    return schema


def _describe_fields(schemas: dict[str, Any]) -> None:
    models = {model.__name__: model for model in _models(BaseModel)}
    for name, schema in schemas.items():
        model = models.get(name.removesuffix("-Input").removesuffix("-Output"))
        texts = _texts(model) if model is not None else {}
        for field, described in schema.get("properties", {}).items():
            if field in texts:
                described.setdefault("description", texts[field])


def _models(base: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for model in base.__subclasses__():
        if model.__module__.startswith(_PACKAGES):
            yield model
        yield from _models(model)


def _texts(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings of a model's fields, inherited ones included."""
    found: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        if not issubclass(kind, BaseModel) or kind is BaseModel:
            continue
        tree = ast.parse(inspect.getsource(sys.modules[kind.__module__]))
        [body] = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__]
        for node, following in itertools.pairwise(body):
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                found[node.target.id] = inspect.cleandoc(str(following.value.value)).replace("\n", " ")
    return found
