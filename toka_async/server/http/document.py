"""The document that describes the API over HTTP: OpenAPI 3.1 (https://spec.openapis.org/oas/v3.1.1.html).

It is made from the table of routes and from the Structs that requests are parsed to. Knows no handlers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec

import toka_async
from toka_async.openai.errors import ErrorResponse
from toka_async.openai.generation import RequestLimits
from toka_async.openai.requests import WireRequest
from toka_async.openai.schemas import Schema, refer_to, request_schemas, response_schemas

JSON, EVENTS, FORM_DATA = "application/json", "text/event-stream", "multipart/form-data"
MEDIA: dict[str, Schema] = {  # media types of answers that are no Struct
    JSON: {"type": "object"},
    "text/plain": {"type": "string"},
    "application/octet-stream": {},
    "text/html": {"type": "string"},
    "text/javascript": {"type": "string"},
    "text/css": {"type": "string"},
    "image/svg+xml": {"type": "string"},
}
# Bad HTTP; a web page that may not use the server; a slow request; a strange Expect; too many connections from an
# address; an error of the server's; too many connections.
ANY_TIME = (400, 403, 408, 417, 429, 500, 503)
WITH_BODY = (413, 415)

_PLACE = re.compile(r"\{(\w+)(?::[^}]*)?\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """The description of one method of a path.

    name: unique. body: the JSON request. needs_body: false where it may be missing. form: the schema of a request that
    is a form. answer: a 200's Struct or schema, or a media type. is_list: it may be a list of such Structs too.
    refusal: a 400's Struct, besides the error that all have. event: those of a streamed 200. query: parameters, their
    schemas. statuses: of errors, besides those that every operation can have. empty: of answers without a body.
    """

    name: str
    summary: str
    answer: type[msgspec.Struct] | Schema | str
    body: type[WireRequest] | None = None
    needs_body: bool = True
    form: Schema | None = None
    is_list: bool = False
    refusal: type[msgspec.Struct] | None = None
    event: Sequence[type[msgspec.Struct]] = ()
    query: Mapping[str, Schema] | None = None
    statuses: tuple[int, ...] = ()
    empty: tuple[int, ...] = ()

    def errors(self, *, needs_key: bool) -> list[int]:
        with_body = WITH_BODY if self.body or self.form else ()
        return sorted({*ANY_TIME, *with_body, *self.statuses, *((401,) if needs_key else ())})


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts of the server that the document names. open_paths: paths that never need a key."""

    model: str
    limits: RequestLimits
    has_keys: bool
    open_paths: frozenset[str]


def build_document(operations: Mapping[tuple[str, str], Operation], facts: Facts) -> dict[str, Any]:
    """Builds the document for operations by method and path; a path may have patterns: `{model:.+}`."""
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in operations.items():
        needs_key = facts.has_keys and path not in facts.open_paths
        described = describe_operation(operation, path, needs_key=needs_key)
        if facts.has_keys and not needs_key:
            described["security"] = []
        paths.setdefault(strip_patterns(path), {})[method.lower()] = described
    bodies = [each.body for each in operations.values() if each.body is not None]
    given = [kind for each in operations.values() for kind in (each.answer, *each.event, each.refusal)]
    answers = [kind for kind in (*given, ErrorResponse) if isinstance(kind, type)]
    schemas = request_schemas(bodies, facts.model, facts.limits) | response_schemas(answers)
    made: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "toka-async", "version": toka_async.__version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": dict(sorted(schemas.items())), "responses": error_responses(operations.values())},
    }
    if facts.has_keys:
        made["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
        }
        made["security"] = [{"key": []}, {"header": []}]
    return made


def strip_patterns(path: str) -> str:
    """Removes the patterns from a path."""
    return _PLACE.sub(r"{\1}", path)


def describe_operation(operation: Operation, path: str, *, needs_key: bool) -> dict[str, Any]:
    made: dict[str, Any] = {"operationId": operation.name, "summary": operation.summary}
    if parameters := build_parameters(path, operation.query or {}):
        made["parameters"] = parameters
    if operation.body is not None:
        content = {JSON: {"schema": refer_to(operation.body)}}
        made["requestBody"] = {"required": operation.needs_body, "content": content}
    if operation.form is not None:
        made["requestBody"] = {"required": True, "content": {FORM_DATA: {"schema": operation.form}}}
    made["responses"] = build_responses(operation, operation.errors(needs_key=needs_key))
    return made


def build_parameters(path: str, query: Mapping[str, Schema]) -> Sequence[dict[str, Any]]:
    text = {"type": "string", "minLength": 1}
    places = [{"name": name, "in": "path", "required": True, "schema": text} for name in _PLACE.findall(path)]
    return [*places, *({"name": name, "in": "query", "schema": schema} for name, schema in query.items())]


def build_responses(operation: Operation, errors: Iterable[int]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if isinstance(operation.answer, str):
        content[operation.answer] = {"schema": MEDIA[operation.answer]}
    elif isinstance(operation.answer, dict):
        content[JSON] = {"schema": operation.answer}
    else:
        one = refer_to(operation.answer)
        schema = {"anyOf": [one, {"type": "array", "items": one}]} if operation.is_list else one
        content[JSON] = {"schema": schema}
    if operation.event:
        content[EVENTS] = {"schema": event_schema(operation.event)}
    good = {"200": {"description": "OK", "content": content}}
    empty = {str(status): {"description": HTTPStatus(status).phrase} for status in operation.empty}
    made = good | empty | {str(status): {"$ref": f"#/components/responses/{status}"} for status in errors}
    if operation.refusal is not None:
        either = {"anyOf": [refer_to(operation.refusal), refer_to(ErrorResponse)]}
        made["400"] = {"description": HTTPStatus(400).phrase, "content": {JSON: {"schema": either}}}
    return made


def event_schema(kinds: Iterable[type[msgspec.Struct]]) -> Schema:
    """Returns the schema of an event; the last event is an error, or [DONE] where events have no names."""
    payload = {"anyOf": [*map(refer_to, kinds), refer_to(ErrorResponse)]}
    data = {"type": "string", "contentMediaType": JSON, "contentSchema": payload}
    return {
        "description": "Each event.",
        "type": "object",
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}},
        "required": ["data"],
    }


def error_responses(operations: Iterable[Operation]) -> dict[str, Any]:
    statuses = {status for each in operations for status in each.errors(needs_key=True)}
    content = {JSON: {"schema": refer_to(ErrorResponse)}}
    return {str(status): {"description": HTTPStatus(status).phrase, "content": content} for status in sorted(statuses)}
