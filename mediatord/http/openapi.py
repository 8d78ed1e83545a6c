"""
The OpenAPI document of the public listener (contract section 3).

Schemas of requests come from the models that validate them, those of responses from the tables that they are built
of. The served copy is a file beside this module, written by ``python -m mediatord.http.openapi``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from mediatord.observability.metrics import CONTENT_TYPE
from mediatord.protocol.decentrl.commands import (
    MAX_DID_CHARACTERS,
    AuthenticateMessage,
    DirectCommand,
    DirectPayload,
    PrivateCommand,
    PublicCommand,
    PublicPayload,
    PublicQuery,
)
from mediatord.protocol.didcomm.json_web_signature import SIGNED_MEDIA_TYPE as SIGNED_TYPE
from mediatord.protocol.didcomm.jwe import ENCRYPTED_MEDIA_TYPE
from mediatord.protocol.didcomm.message import PLAINTEXT_MEDIA_TYPE
from mediatord.protocol.error_codes import (
    DECENTRL_CLOSE_CODES,
    DECENTRL_ERROR_CODES,
    DIDCOMM_ERROR_CODES,
    IDENTUS_PROBLEM_CODES,
)

Schema = dict[str, Any]

COMMAND_SCHEMAS = ("DirectCommand", "PrivateCommand", "PublicCommand")
# Errors that belong to no command, by status (reference section 12).
HTTP_ERROR_CODES = {
    **{400: "BAD_REQUEST", 403: "ORIGIN_NOT_ALLOWED", 404: "NOT_FOUND"},
    **{405: "METHOD_NOT_ALLOWED", 426: "UPGRADE_REQUIRED"},
}
STRING_SCHEMA: Schema = {"type": "string"}
NUMBER_SCHEMA: Schema = {"type": "number"}


def build_ref(name: str) -> Schema:
    """A reference to a component."""
    return {"$ref": f"#/components/schemas/{name}"}


def build_any_of(names: Sequence[str]) -> Schema:
    """Any of several components."""
    return {"anyOf": [build_ref(name) for name in names]}


def build_const(value: str) -> Schema:
    """A constant string."""
    return {"type": "string", "const": value}


def build_enum(*values: str) -> Schema:
    """One of several strings."""
    return {"type": "string", "enum": sorted(set(values))}


def build_object(
    members: Mapping[str, Schema], *, about: str = "", optional: Mapping[str, Schema] | None = None
) -> Schema:
    """An object with these members and no others."""
    return {
        **({"description": about} if about else {}),
        "type": "object",
        "properties": {**members, **(optional or {})},
        "required": list(members),
        "additionalProperties": False,
    }


def build_refusal_ref(status: int) -> Schema:
    """A reference to the non-DIDComm error of a status."""
    return build_ref(f"Refused{status}")


def build_components() -> dict[str, Schema]:
    """All named schemas."""
    return {
        **_build_request_schemas(),
        **_build_response_schemas(),
        **_build_refusal_schemas(),
        **_build_reply_schemas(),
        **_build_frame_schemas(),
        **_build_didcomm_schemas(),
    }


def build_query_parameters() -> dict[str, Schema]:
    """Query parameters of a public channel, by name."""
    shown = PublicQuery.model_json_schema(schema_generator=_SchemaGenerator)
    properties: dict[str, Schema] = shown["properties"]
    return properties


class _SchemaGenerator(GenerateJsonSchema):
    """Omits titles that repeat a name, and defaults of optional members."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Never."""
        return False

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        """Only defaults that are values."""
        shown = super().default_schema(schema)
        if schema.get("default") is None or isinstance(schema.get("default"), BaseModel):
            shown.pop("default", None)
        return shown


def _build_request_schemas() -> dict[str, Schema]:
    models: tuple[type[BaseModel], ...] = (DirectCommand, PrivateCommand, PublicCommand, AuthenticateMessage)
    _, shown = models_json_schema(
        [(model, "validation") for model in models],
        ref_template="#/components/schemas/{model}",
        schema_generator=_SchemaGenerator,
    )
    found: dict[str, Schema] = shown["$defs"]
    return found


def _build_refusal_schemas() -> dict[str, Schema]:
    """Errors by status, and all in one."""
    named = [(wire.status, wire.code) for wire in DECENTRL_ERROR_CODES.values()] + list(HTTP_ERROR_CODES.items())
    by_status = {
        f"Refused{status}": _build_error_schema(code for at, code in named if at == status)
        for status, _ in sorted(named)
    }
    return {"Error": _build_error_schema(code for _, code in named), **by_status}


def _build_error_schema(named: Iterable[str]) -> Schema:
    return build_object({"type": build_const("ERROR"), "code": build_enum(*named)})


def _build_response_schemas() -> dict[str, Schema]:
    return {
        "Trouble": build_object(
            {"status": build_const("error"), "detail": STRING_SCHEMA},
            about="An error outside of both protocols.",
        ),
        "Unready": build_object(
            {"status": build_const("error"), "detail": STRING_SCHEMA},
            optional={"age_ms": {"type": "integer", "minimum": 0}},
        ),
        "DIDDocument": {
            "description": "The mediator's DID document (DCTRL-0004 3.2, with additions for DIDComm).",
            "type": "object",
            "required": ["@context", "id", "verificationMethod", "keyAgreement", "authentication", "service"],
        },
        "Page": build_object({name: {"type": "integer", "minimum": 0} for name in ("page", "page_size", "total")}),
        "PublicEvents": build_object(
            {
                "publisher_did": STRING_SCHEMA,
                "events": _build_array(
                    {
                        "id": STRING_SCHEMA,
                        "event": STRING_SCHEMA,
                        "tags": _build_string_array(),
                        "timestamp": NUMBER_SCHEMA,
                        "event_signature": STRING_SCHEMA,
                    },
                    {"channel_id": STRING_SCHEMA},
                ),
                "pagination": build_ref("Page"),
            },
            about="A page of a public channel, newest first (reference 10.3).",
        ),
    }


# Replies of successful commands; all others get a bare Success.
COMMAND_REPLIES = {
    "REQUEST_COMMUNICATION_CONTRACT to the mediator": "Registered",
    "REQUEST_COMMUNICATION_CONTRACT to an identity": "Requested",
    "QUERY_PENDING_COMMUNICATION_CONTRACT_REQUESTS": "PendingContractRequestsPage",
    "QUERY_COMMUNICATION_CONTRACTS": "ContractsPage",
    "QUERY_PENDING_EVENTS": "PendingEventsPage",
    "QUERY_EVENTS": "EventsPage",
    "TWO_WAY_PRIVATE": "Delivered",
    "PUBLISH_PUBLIC_EVENT": "Published",
}
SUCCESS_SCHEMA = "Success"


def list_command_names() -> list[str]:
    """The types of all commands with a type."""
    models = (*get_args(DirectPayload), *get_args(PublicPayload))
    return [get_args(model.model_fields["type"].annotation)[0] for model in models]


def _build_reply_schemas() -> dict[str, Schema]:
    contract = build_ref("SignedCommunicationContract")
    request = {"encrypted_contract_request": STRING_SCHEMA, "requestor_ephemeral_public_key": STRING_SCHEMA}
    return {
        SUCCESS_SCHEMA: _build_success_schema({}),
        "Registered": _build_success_schema(
            {
                "code": build_const("MEDIATOR_REGISTRATION_SUCCESS"),
                "payload": build_object({"signed_communication_contract": contract}),
            }
        ),
        "Requested": _build_success_schema({"code": build_const("REQUESTED")}),
        "Delivered": _build_success_schema({"pendingEventId": STRING_SCHEMA}),
        "Published": _build_success_schema({"public_event_id": STRING_SCHEMA}),
        "PendingContractRequestsPage": _build_page_schema(
            "pending_communication_contract_requests", {"id": STRING_SCHEMA, "sender_did": STRING_SCHEMA, **request}
        ),
        "ContractsPage": _build_page_schema(
            "communication_contracts", {"id": STRING_SCHEMA, "signed_communication_contract": contract}
        ),
        "PendingEventsPage": _build_page_schema(
            "pending_events", {"id": STRING_SCHEMA, "payload": STRING_SCHEMA, "sender_did": STRING_SCHEMA}
        ),
        "EventsPage": _build_page_schema(
            "events",
            {
                "id": STRING_SCHEMA,
                "payload": STRING_SCHEMA,
                "encrypted_tags": _build_string_array(),
                "timestamp": NUMBER_SCHEMA,
            },
        ),
    }


def _build_frame_schemas() -> dict[str, Schema]:
    """Frames of a Decentrl socket (DCTRL-0004 section 10)."""
    event = {"id": STRING_SCHEMA, "sender_did": STRING_SCHEMA, "payload": STRING_SCHEMA}
    return {
        "AuthSuccess": build_object({"type": build_const("AUTH_SUCCESS")}),
        "AuthFailed": build_object(
            {
                "type": build_const("AUTH_FAILED"),
                "code": build_enum(*(wire.code for wire in DECENTRL_CLOSE_CODES.values())),
            }
        ),
        "Ping": build_object({"type": build_const("PING"), "timestamp": {"type": "integer"}}),
        "PendingEventsPushed": build_object({"type": build_const("PENDING_EVENTS"), "events": _build_array(event)}),
        "ContractsUpdated": build_object({"type": build_const("CONTRACTS_UPDATED")}),
    }


def _build_didcomm_schemas() -> dict[str, Schema]:
    message = {"id": STRING_SCHEMA, "type": STRING_SCHEMA, "body": {"type": "object"}}
    problem_codes = build_enum(*(wire.code for wire in DIDCOMM_ERROR_CODES.values()), *IDENTUS_PROBLEM_CODES.values())
    return {
        "JWE": {
            "description": "A DIDComm v2 encrypted message: a JWE in general JSON serialization.",
            "type": "object",
            "properties": {
                **dict.fromkeys(("protected", "iv", "ciphertext", "tag"), STRING_SCHEMA),
                "recipients": {"type": "array", "items": {"type": "object"}, "minItems": 1},
            },
            "required": ["protected", "recipients", "iv", "ciphertext", "tag"],
        },
        "JWS": {
            "description": "A DIDComm v2 signed message: a JWS in general JSON serialization.",
            "type": "object",
            "properties": {
                "payload": STRING_SCHEMA,
                "signatures": {"type": "array", "items": {"type": "object"}, "minItems": 1},
            },
            "required": ["payload", "signatures"],
        },
        "ProblemReport": {
            "description": "An unencrypted problem report 2.0, for a sender whose key is not known.",
            "type": "object",
            "properties": {
                **message,
                "type": build_const("https://didcomm.org/report-problem/2.0/problem-report"),
                "body": {
                    "type": "object",
                    "properties": {"code": problem_codes, "comment": STRING_SCHEMA},
                    "required": ["code", "comment"],
                },
            },
            "required": list(message),
        },
        "Invitation": {
            "description": "An out-of-band 2.0 invitation to request mediation.",
            "type": "object",
            "properties": {
                **message,
                "type": build_const("https://didcomm.org/out-of-band/2.0/invitation"),
                "from": STRING_SCHEMA,
            },
            "required": [*message, "from"],
        },
    }


def _build_success_schema(members: Mapping[str, Schema]) -> Schema:
    return build_object({"type": build_const("SUCCESS"), **members})


def _build_page_schema(name: str, members: Mapping[str, Schema]) -> Schema:
    return _build_success_schema(
        {"payload": build_object({name: _build_array(members), "pagination": build_ref("Page")})}
    )


def _build_array(members: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    return {"type": "array", "items": build_object(members, optional=optional)}


def _build_string_array() -> Schema:
    return {"type": "array", "items": STRING_SCHEMA}


ContentSchemas = Mapping[str, Schema]

# Version of the document, independent of releases of the daemon.
_DOCUMENT_VERSION = "1.0.0"
_JSON_TYPE = "application/json"
_TEXT_TYPE = "text/plain"
_HTML_TYPE = "text/html"

_API_DESCRIPTION = """
One listener for two protocols: DIDComm v2 at `/didcomm`, and Decentrl (DCTRL-0004, DCTRL-0007) at `/`,
`/public/{did}` and `/ws`.

`POST /` takes a DIDComm message if the Content-Type contains `didcomm`, and a Decentrl command otherwise, with any
other Content-Type or none. Errors outside `/didcomm` are `{"type":"ERROR","code":...}`: in addition to those listed
with an operation, 404 `NOT_FOUND` for an unknown path, 405 `METHOD_NOT_ALLOWED` with `Allow`, and 400 `BAD_REQUEST`
for invalid HTTP.

A request line has at most 16 KiB. Pages of any origin may read all responses except those of `/metrics`; `OPTIONS`
responds 204 with `Access-Control-Allow-Methods` and `Access-Control-Allow-Headers` at every path. `HEAD` is allowed
wherever `GET` is, except for sockets.
"""
_DECENTRL_SOCKET_DESCRIPTION = """
With `Upgrade: websocket`. If the first message is a DIDComm envelope, the socket is the same as at `/didcomm`.
Otherwise it must be an `AuthenticateMessage`, as text, within ten seconds; its signature covers the canonical JSON of
`did`, `signing_key_id`, `timestamp` and `nonce`, and is valid for one socket. The response is `AuthSuccess`, or
`AuthFailed` and the end of the socket. Afterwards the mediator sends a `Ping` every thirty seconds,
`PendingEventsPushed` and `ContractsUpdated`. Messages of the client are ignored. A pushed event stays queued until it
is acknowledged by a command.
"""
_DIDCOMM_SOCKET_DESCRIPTION = """
With `Upgrade: websocket`: one DIDComm message in each frame, in both directions. Messages are pushed to a socket with
live delivery turned on (Message Pickup 3.0).
"""
_HEADER_COMPONENTS: Mapping[str, Schema] = {
    "Access-Control-Allow-Origin": {"required": True, "schema": build_const("*")},
    "Access-Control-Expose-Headers": {"required": True, "schema": build_const("Retry-After")},
    "Retry-After": {"description": "Seconds.", "required": True, "schema": {"type": "integer", "minimum": 0}},
}
# Statuses of DIDComm errors in JSON, before a message was read; statuses with Retry-After.
_JSON_ERROR_STATUSES = (500, 503)
_RETRY_STATUSES = (429, 503)


def build_openapi_document() -> dict[str, Any]:
    """Build the whole document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mediatord",
            "version": _DOCUMENT_VERSION,
            "description": _API_DESCRIPTION.strip(),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": name} for name in ("Decentrl", "DIDComm", "Mediator", "Operation")],
        "paths": {
            "/": {"get": _describe_root_get(), "post": _describe_root_post()},
            "/didcomm": {
                "get": _describe_upgrade(
                    "DIDComm", _DIDCOMM_SOCKET_DESCRIPTION, {405: _build_response("Not an upgrade.")}
                ),
                "post": _describe_didcomm_post(),
            },
            "/ws": {
                "get": _describe_upgrade(
                    "Decentrl",
                    _DECENTRL_SOCKET_DESCRIPTION,
                    {426: _build_json_response("Not an upgrade.", build_refusal_ref(426))},
                )
            },
            "/public/{did}": {"get": _describe_public_channel()},
            "/.well-known/did.json": {
                "get": _describe_static_document(
                    "The document of the mediator's did:web", _JSON_TYPE, build_ref("DIDDocument")
                )
            },
            "/did": {"get": _describe_static_document("The mediator's did:peer:2", _TEXT_TYPE, STRING_SCHEMA)},
            "/invitation": {"get": _describe_invitation()},
            "/invitationOOB": {
                "get": _describe_static_document("The invitation as a URL", _TEXT_TYPE, STRING_SCHEMA)
            },
            "/openapi.json": {"get": _describe_static_document("This document", _JSON_TYPE, {"type": "object"})},
            "/health": {"get": _describe_health()},
            "/ready": {"get": _describe_ready()},
            "/metrics": {"get": _describe_metrics()},
        },
        "components": {"schemas": build_components(), "headers": _HEADER_COMPONENTS},
    }


def render_openapi_document() -> str:
    """Render the file that is served."""
    return json.dumps(build_openapi_document(), indent=1, ensure_ascii=False) + "\n"


def _describe_root_post() -> Schema:
    rows = [f"| `{command}` | `{reply}` |" for command, reply in COMMAND_REPLIES.items()]
    told = {name.partition(" ")[0] for name in COMMAND_REPLIES}
    rows += [f"| `{name}` | `{SUCCESS_SCHEMA}` |" for name in list_command_names() if name not in told]
    table = "\n".join(["", "| command | reply |", "|---|---|", *rows])
    letters = {ENCRYPTED_MEDIA_TYPE: build_ref("JWE")}
    replies = {_JSON_TYPE: build_any_of([SUCCESS_SCHEMA, *dict.fromkeys(COMMAND_REPLIES.values())]), **letters}
    refused = {status: _build_didcomm_content(status) for status in _list_didcomm_statuses()}
    for status in {wire.status for wire in DECENTRL_ERROR_CODES.values()}:
        content = refused.get(status, {})
        both = [build_refusal_ref(status), *([content[_JSON_TYPE]] if _JSON_TYPE in content else [])]
        refused[status] = {**content, _JSON_TYPE: {"anyOf": both} if len(both) > 1 else both[0]}
    return _build_operation(
        "Decentrl",
        "A Decentrl command, or a DIDComm message by its Content-Type",
        {200: _build_response("Executed.", replies), 202: _build_accepted(), **_build_refusals(refused)},
        about="The response is 200 when the command has been executed and is durable." + "\n" + table,
        requestBody=_build_request_body({_JSON_TYPE: build_any_of(COMMAND_SCHEMAS), **letters}),
    )


def _describe_didcomm_post() -> Schema:
    refused = {status: _build_didcomm_content(status) for status in _list_didcomm_statuses()}
    return _build_operation(
        "DIDComm",
        "A DIDComm message",
        {
            200: _build_response("A reply.", {ENCRYPTED_MEDIA_TYPE: build_ref("JWE")}),
            202: _build_accepted(),
            **_build_refusals(refused),
        },
        requestBody=_build_request_body({ENCRYPTED_MEDIA_TYPE: build_ref("JWE")}),
    )


def _describe_public_channel() -> Schema:
    did = {"type": "string", "pattern": "^did:", "maxLength": MAX_DID_CHARACTERS}
    asked = [
        {
            "name": name,
            "in": "query",
            "schema": schema,
            **({"style": "form", "explode": False} if schema.get("type") == "array" else {}),
        }
        for name, schema in build_query_parameters().items()
    ]
    refused = {status: {_JSON_TYPE: build_refusal_ref(status)} for status in (400, 429, 500, 503)}
    return _build_operation(
        "Decentrl",
        "A public channel",
        {
            200: _build_json_response("A page of events; empty for an unknown publisher.", build_ref("PublicEvents")),
            **_build_refusals(refused),
        },
        about="All filters must match; one of several tags is sufficient. Bounds are inclusive.",
        parameters=[{"name": "did", "in": "path", "required": True, "schema": did}, *asked],
    )


def _describe_root_get() -> Schema:
    content = {_JSON_TYPE: build_any_of(["DIDDocument", "Invitation"]), _HTML_TYPE: STRING_SCHEMA}
    return _build_operation(
        "Mediator",
        "The mediator's DID document",
        {
            101: {"description": "With an upgrade: the same socket as at `/ws`."},
            200: _build_response("The document.", content),
            **_build_refusals({status: {_JSON_TYPE: build_refusal_ref(status)} for status in _RETRY_STATUSES}),
        },
        about="With `_oob`, as in the URL of an invitation, the same as `/invitation`.",
        parameters=[{"name": "_oob", "in": "query", "schema": STRING_SCHEMA}],
    )


def _describe_invitation() -> Schema:
    content = {_JSON_TYPE: build_ref("Invitation"), _HTML_TYPE: STRING_SCHEMA}
    return _build_operation(
        "Mediator",
        "An out-of-band 2.0 invitation",
        {200: _build_response("JSON, or an HTML page with a QR code, by the Accept header.", content)},
        parameters=[{"name": "_oob", "in": "query", "schema": STRING_SCHEMA}],
    )


def _describe_health() -> Schema:
    trouble = _build_json_response("It cannot serve.", build_ref("Trouble"), retry=True)
    well = _build_json_response("It can serve.", build_object({"status": build_const("ok")}))
    return _build_operation(
        "Operation", "Whether the mediator can serve requests", {200: well, 500: _build_fault(), 503: trouble}
    )


def _describe_ready() -> Schema:
    milliseconds = {"type": "integer", "minimum": 0}
    well = build_object({"status": build_const("ok"), "cycle_ms": milliseconds, "age_ms": milliseconds})
    about = """
A request starts an end-to-end probe, which sends a message through the mediator's own listener every few seconds.
`cycle_ms` is the duration of the last successful cycle, `age_ms` its age. `detail` names what failed: `store`,
`listener`, `socket`, `forward`, `push` or `acknowledgement`; or it says why no requests should be sent here.
"""
    return _build_operation(
        "Operation",
        "Whether the end-to-end probe succeeds",
        {
            200: _build_json_response("It succeeds.", well),
            500: _build_fault(),
            503: _build_json_response("It fails.", build_ref("Unready"), retry=True),
        },
        about=about,
    )


def _describe_metrics() -> Schema:
    shown = {"description": "Prometheus' text format.", "content": {CONTENT_TYPE: {"schema": STRING_SCHEMA}}}
    refused = _build_json_response("Not allowed from this address.", build_ref("Trouble"))
    late = _build_json_response("Time-out.", build_ref("Trouble"), retry=True)
    asked = {
        "description": "Run the check of `/ready` as well, which updates `mediator_ready`.",
        "schema": STRING_SCHEMA,
    }
    parameters = [{"name": "ready", "in": "query", "required": False, **asked}]
    responses = {200: shown, 403: refused, 500: _build_fault(), 503: late}
    return _build_operation("Operation", "Metrics", responses, parameters=parameters)


def _describe_static_document(summary: str, media_type: str, schema: Schema) -> Schema:
    return _build_operation("Mediator", summary, {200: _build_response(f"{summary}.", {media_type: schema})})


def _describe_upgrade(tag: str, about: str, otherwise: Mapping[int, Schema]) -> Schema:
    refused = {status: {_JSON_TYPE: build_refusal_ref(status)} for status in (429, 503)}
    foreign: ContentSchemas = {_JSON_TYPE: build_refusal_ref(403)}
    if tag == "DIDComm":
        foreign = {_TEXT_TYPE: STRING_SCHEMA}
        refused = {429: {_TEXT_TYPE: STRING_SCHEMA}, 503: {_JSON_TYPE: build_ref("Trouble")}}
    answers = {
        101: {"description": "The socket is open."},
        403: _build_response("The origin is not allowed.", foreign),
    }
    return _build_operation(tag, "A WebSocket", {**answers, **otherwise, **_build_refusals(refused)}, about=about)


def _build_operation(
    tag: str, summary: str, responses: Mapping[int, Schema], *, about: str = "", **more: Any
) -> Schema:
    described = {"description": about.strip()} if about else {}
    numbered = {str(status): responses[status] for status in sorted(responses)}
    return {"tags": [tag], "summary": summary, **described, **more, "responses": numbered}


def _build_request_body(content: ContentSchemas) -> Schema:
    return {"required": True, "content": _build_content(content)}


def _build_content(content: ContentSchemas) -> dict[str, Any]:
    return {media_type: {"schema": schema} for media_type, schema in content.items()}


def _build_response(about: str, content: ContentSchemas | None = None, *, retry: bool = False) -> Schema:
    names = ["Access-Control-Allow-Origin", *(["Retry-After", "Access-Control-Expose-Headers"] if retry else [])]
    headers = {name: {"$ref": f"#/components/headers/{name}"} for name in names}
    return {"description": about, "headers": headers, **({"content": _build_content(content)} if content else {})}


def _build_json_response(about: str, schema: Schema, *, retry: bool = False) -> Schema:
    return _build_response(about, {_JSON_TYPE: schema}, retry=retry)


def _build_refusals(refused: Mapping[int, ContentSchemas]) -> dict[int, Schema]:
    return {
        status: _build_response("Rejected.", content, retry=status in _RETRY_STATUSES)
        for status, content in refused.items()
    }


def _build_accepted() -> Schema:
    return _build_response("Accepted, without a reply on this connection.")


def _build_fault() -> Schema:
    return _build_json_response("Internal error.", build_ref("Trouble"))


def _list_didcomm_statuses() -> list[int]:
    return sorted(
        {
            status
            for wire in DIDCOMM_ERROR_CODES.values()
            for status in (wire.status, wire.encrypted_status or 400)
            if status >= 400
        }
    )


def _build_didcomm_content(status: int) -> dict[str, Schema]:
    """A problem report, encrypted or signed where possible; errors before a message was read are JSON."""
    content = {PLAINTEXT_MEDIA_TYPE: build_ref("ProblemReport")}
    if status in {wire.status for wire in DIDCOMM_ERROR_CODES.values() if wire.is_signed}:
        content[SIGNED_TYPE] = build_ref("JWS")
    if status in {wire.encrypted_status for wire in DIDCOMM_ERROR_CODES.values()}:
        content[ENCRYPTED_MEDIA_TYPE] = build_ref("JWE")
    if status in _JSON_ERROR_STATUSES:
        content[_JSON_TYPE] = build_ref("Trouble")
    return content


OPENAPI_JSON = files("mediatord.http").joinpath("openapi.json").read_bytes()


if __name__ == "__main__":
    Path(__file__).with_name("openapi.json").write_text(render_openapi_document(), encoding="utf-8")
