"""
The OpenAPI document of the public listener (contract section 3).

Schemas of requests come from the models that validate them, those of responses from the tables that they are built
of. The served copy is a file beside this module, written by ``python -m mediatord.http.openapi``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
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


class Schema(dict[str, Any]):
    """A JSON Schema."""


# Errors that belong to no command, by status (reference section 12).
HTTP_ERROR_CODES = {
    **{400: "BAD_REQUEST", 403: "ORIGIN_NOT_ALLOWED", 404: "NOT_FOUND"},
    **{405: "METHOD_NOT_ALLOWED", 426: "UPGRADE_REQUIRED"},
}
_TYPE_NAMES = {str: "string", float: "number", int: "integer", dict: "object"}


def build_schema(shape: Any) -> Schema:
    """
    A schema of a shape written in Python: a type, a constant, a set of constants, `[item]`, or a dict for an object
    with these members and no others, of which those with a `?` are optional. Schemas are left as they are.
    """
    match shape:
        case Schema():
            return shape
        case type():
            return Schema(type=_TYPE_NAMES[shape])
        case str():
            return Schema(type="string", const=shape)
        case set():
            return Schema(type="string", enum=sorted(shape))
        case [item]:
            return Schema(type="array", items=build_schema(item))
    members = {name.removesuffix("?"): build_schema(member) for name, member in shape.items()}
    required = [name for name in shape if not name.endswith("?")]
    return Schema(type="object", properties=members, required=required, additionalProperties=False)


def build_ref(name: str) -> Schema:
    """A reference to a component."""
    return Schema({"$ref": f"#/components/schemas/{name}"})


def build_any_of(names: Iterable[str]) -> Schema:
    """Any of several components."""
    return Schema(anyOf=[build_ref(name) for name in names])


def build_refusal_ref(status: int) -> Schema:
    """A reference to the non-DIDComm error of a status."""
    return build_ref(f"Refused{status}")


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


def build_components() -> dict[str, Schema]:
    """All named schemas."""
    models: tuple[type[BaseModel], ...] = (DirectCommand, PrivateCommand, PublicCommand, AuthenticateMessage)
    _, shown = models_json_schema(
        [(model, "validation") for model in models],
        ref_template="#/components/schemas/{model}",
        schema_generator=_SchemaGenerator,
    )
    refusals = [(wire.status, wire.code) for wire in DECENTRL_ERROR_CODES.values()] + list(HTTP_ERROR_CODES.items())
    errors = {"Error": {code for _, code in refusals}} | {
        f"Refused{status}": {code for at, code in refusals if at == status} for status, _ in sorted(refusals)
    }
    replies = {name: {"type": "SUCCESS", **members} for name, members in _REPLIES.items()}
    shapes = {**_SHAPES, **{name: {"type": "ERROR", "code": codes} for name, codes in errors.items()}, **replies}
    built = {name: build_schema(shape) for name, shape in shapes.items()}
    for name, about in _SHAPE_DESCRIPTIONS.items():
        built[name] = Schema(description=about, **built[name])
    return {**shown["$defs"], **built, **_DIDCOMM_SCHEMAS}


_COUNT = Schema(type="integer", minimum=0)
_CONTRACT, _PAGE = build_ref("SignedCommunicationContract"), build_ref("Page")


def _page(name: str, **members: Any) -> dict[str, Any]:
    """The payload of a page of items with these members."""
    return {"payload": {name: [members], "pagination": _PAGE}}


_SHAPES: dict[str, Any] = {
    "Trouble": {"status": "error", "detail": str},
    "Unready": {"status": "error", "detail": str, "age_ms?": _COUNT},
    "Page": {"page": _COUNT, "page_size": _COUNT, "total": _COUNT},
    "PublicEvents": {
        "publisher_did": str,
        "events": [
            {"id": str, "event": str, "tags": [str], "timestamp": float, "event_signature": str, "channel_id?": str}
        ],
        "pagination": _PAGE,
    },
    # Frames of a Decentrl socket (DCTRL-0004 section 10).
    "AuthSuccess": {"type": "AUTH_SUCCESS"},
    "AuthFailed": {"type": "AUTH_FAILED", "code": {wire.code for wire in DECENTRL_CLOSE_CODES.values()}},
    "Ping": {"type": "PING", "timestamp": int},
    "PendingEventsPushed": {
        "type": "PENDING_EVENTS",
        "events": [{"id": str, "sender_did": str, "payload": str}],
    },
    "ContractsUpdated": {"type": "CONTRACTS_UPDATED"},
}
_SHAPE_DESCRIPTIONS = {
    "Trouble": "An error of neither protocol.",
    "PublicEvents": "A page of a public channel, newest first (reference 10.3).",
}
# Members of replies to commands, besides their type.
_REPLIES: dict[str, dict[str, Any]] = {
    "Success": {},
    "Registered": {
        "code": "MEDIATOR_REGISTRATION_SUCCESS",
        "payload": {"signed_communication_contract": _CONTRACT},
    },
    "Requested": {"code": "REQUESTED"},
    "Delivered": {"pendingEventId": str},
    "Published": {"public_event_id": str},
    "PendingContractRequestsPage": _page(
        "pending_communication_contract_requests",
        id=str,
        sender_did=str,
        encrypted_contract_request=str,
        requestor_ephemeral_public_key=str,
    ),
    "ContractsPage": _page("communication_contracts", id=str, signed_communication_contract=_CONTRACT),
    "PendingEventsPage": _page("pending_events", id=str, payload=str, sender_did=str),
    "PushDevices": {
        "payload": {
            "services": [{"fcm", "apns", "web_push"}],
            "mediator": str,
            "vapid_public_key?": str,
            "encrypted_push_devices": str,
            "ephemeral_public_key": str,
        }
    },
    "EventsPage": _page("events", id=str, payload=str, encrypted_tags=[str], timestamp=float),
}
# Replies of successful commands; all others get a bare Success.
COMMAND_REPLIES = {
    "REQUEST_COMMUNICATION_CONTRACT to the mediator": "Registered",
    "REQUEST_COMMUNICATION_CONTRACT to an identity": "Requested",
    "QUERY_PENDING_COMMUNICATION_CONTRACT_REQUESTS": "PendingContractRequestsPage",
    "QUERY_COMMUNICATION_CONTRACTS": "ContractsPage",
    "QUERY_PENDING_EVENTS": "PendingEventsPage",
    "QUERY_EVENTS": "EventsPage",
    "QUERY_PUSH_DEVICES": "PushDevices",
    "TWO_WAY_PRIVATE": "Delivered",
    "PUBLISH_PUBLIC_EVENT": "Published",
}


def list_command_names() -> list[str]:
    """The types of all commands with a type."""
    models = (*get_args(DirectPayload), *get_args(PublicPayload))
    return [get_args(model.model_fields["type"].annotation)[0] for model in models]


def _open_object(about: str, **members: Any) -> Schema:
    """An object with at least these members, in one of the protocols' own forms."""
    shown = {name: build_schema(member) for name, member in members.items()}
    return Schema(description=about, type="object", properties=shown, required=list(members))


def _message(about: str, type_: str, **members: Any) -> Schema:
    return _open_object(about, **{"id": str, "type": type_, "body": dict, **members})


_OBJECTS = Schema(type="array", items={"type": "object"}, minItems=1)
_PROBLEM_CODES = {wire.code for wire in DIDCOMM_ERROR_CODES.values()} | set(IDENTUS_PROBLEM_CODES.values())
_PROBLEM_BODY = Schema(
    type="object",
    properties={"code": build_schema(_PROBLEM_CODES), "comment": build_schema(str)},
    required=["code", "comment"],
)
_DIDCOMM_SCHEMAS: dict[str, Schema] = {
    "DIDDocument": Schema(
        description="The mediator's DID document (DCTRL-0004 3.2, with additions for DIDComm).",
        type="object",
        required=["@context", "id", "verificationMethod", "keyAgreement", "authentication", "service"],
    ),
    "JWE": _open_object(
        "A DIDComm v2 encrypted message: a JWE in general JSON serialization.",
        **{"protected": str, "recipients": _OBJECTS, "iv": str, "ciphertext": str, "tag": str},
    ),
    "JWS": _open_object(
        "A DIDComm v2 signed message: a JWS in general JSON serialization.", payload=str, signatures=_OBJECTS
    ),
    "ProblemReport": _message(
        "An unencrypted problem report 2.0, sent if the sender's key is unknown.",
        "https://didcomm.org/report-problem/2.0/problem-report",
        body=_PROBLEM_BODY,
    ),
    "Invitation": _message(
        "An out-of-band 2.0 invitation to request mediation.",
        "https://didcomm.org/out-of-band/2.0/invitation",
        **{"from": str},
    ),
    "V1Invitation": _open_object(
        "An out-of-band 1.1 invitation to connect with DIDComm v1.",
        **{
            "@type": {"https://didcomm.org/out-of-band/1.1/invitation"},
            "@id": str,
            "label": str,
            "goal_code": str,
            "goal": str,
            "accept": [str],
            "handshake_protocols": [str],
            "services": _OBJECTS,
        },
    ),
}


# Version of the document, independent of releases of the daemon.
_DOCUMENT_VERSION = "1.0.0"
_JSON_TYPE, _TEXT_TYPE, _HTML_TYPE = "application/json", "text/plain", "text/html"

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
`AuthFailed` and a close of the socket. Afterwards the mediator sends a `Ping` every thirty seconds,
`PendingEventsPushed` and `ContractsUpdated`. Messages of the client are ignored. A pushed event stays queued until it
is acknowledged by a command.
"""
_DIDCOMM_SOCKET_DESCRIPTION = """
With `Upgrade: websocket`: one DIDComm message in each frame, in both directions. Messages are pushed to a socket with
live delivery turned on (Message Pickup 3.0).
"""
_HEADER_COMPONENTS = {
    "Access-Control-Allow-Origin": {"required": True, "schema": build_schema("*")},
    "Access-Control-Expose-Headers": {"required": True, "schema": build_schema("Retry-After")},
    "Retry-After": {"description": "Seconds.", "required": True, "schema": _COUNT},
}
_PROBE_DESCRIPTION = """
A request starts an end-to-end probe, which sends a message through the mediator's own listener every few seconds.
`cycle_ms` is the duration of the last successful cycle, `age_ms` its age. `detail` names what failed: `store`,
`listener`, `socket`, `forward`, `push` or `acknowledgement`; or why load balancers should send no requests.
"""
# Statuses of DIDComm errors in JSON, before a message was read; statuses with Retry-After.
_JSON_ERROR_STATUSES = (500, 503)
_RETRY_STATUSES = (429, 503)

# Shapes of bodies by media type.
Content = Mapping[str, Any]
# Description and content of the responses of an operation by status.
Responses = Mapping[int, tuple[str, Content]]


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
        "paths": _build_paths(),
        "components": {"schemas": build_components(), "headers": _HEADER_COMPONENTS},
    }


def render_openapi_document() -> str:
    """Render the file that is served."""
    return json.dumps(build_openapi_document(), indent=1, ensure_ascii=False) + "\n"


def _build_paths() -> dict[str, dict[str, Any]]:
    paths: dict[str, dict[str, Any]] = {}
    for path, method, tag, summary, responses, about, more in _list_operations():
        described = {"description": about.strip()} if about else {}
        numbered = {str(status): _describe_response(status, *responses[status]) for status in sorted(responses)}
        operation = {"tags": [tag], "summary": summary, **described, **more, "responses": numbered}
        paths.setdefault(path, {})[method] = operation
    return paths


def _list_operations() -> Iterable[tuple[str, str, str, str, Responses, str, dict[str, Any]]]:
    """Path, method, tag, summary, responses, description, and further members of all operations."""
    envelope, trouble = {ENCRYPTED_MEDIA_TYPE: build_ref("JWE")}, _json(build_ref("Trouble"))
    refused = {status: ("Rejected.", _json(build_refusal_ref(status))) for status in (400, 429, 500, 503)}
    opened: Responses = {101: ("WebSocket opened.", {})}
    accepted: Responses = {202: ("Accepted; no reply on this connection.", {})}
    fault = {500: ("Internal error.", trouble)}
    foreign, no_upgrade = "Origin not allowed.", "WebSocket upgrade required."

    in_browser = {_JSON_TYPE: build_any_of(["DIDDocument", "Invitation", "V1Invitation"]), _HTML_TYPE: str}
    root: Responses = {
        101: ("With `Upgrade: websocket`, the same WebSocket as at `/ws`.", {}),
        200: ("The document.", in_browser),
        429: refused[429],
        503: refused[503],
    }
    about_root = (
        "With `_oob`, as in the URL of an invitation, returns the same as `/invitation`; with `oob` or `c_i`, unless "
        "DIDComm v1 is disabled, the same as `/invitation/v1`."
    )
    oob = {"parameters": [_describe_parameter("_oob", build_schema(str))]}
    yield "/", "get", "Mediator", "The mediator's DID document", root, about_root, oob

    commands = build_any_of(("DirectCommand", "PrivateCommand", "PublicCommand"))
    answers = build_any_of(["Success", *dict.fromkeys(COMMAND_REPLIES.values())])
    executed = {200: ("Executed.", {_JSON_TYPE: answers, **envelope}), **accepted, **_list_post_refusals()}
    summary = "A Decentrl command, or a DIDComm message by its Content-Type"
    yield "/", "post", "Decentrl", summary, executed, _describe_commands(), _body({_JSON_TYPE: commands, **envelope})

    socket: Responses = {
        403: (foreign, {_TEXT_TYPE: str}),
        405: (no_upgrade, {}),
        429: ("Rejected.", {_TEXT_TYPE: str}),
        503: ("Rejected.", trouble),
    }
    yield "/didcomm", "get", "DIDComm", "DIDComm WebSocket", {**opened, **socket}, _DIDCOMM_SOCKET_DESCRIPTION, {}
    replied = {200: ("A reply.", envelope), **accepted, **_list_didcomm_refusals()}
    yield "/didcomm", "post", "DIDComm", "A DIDComm message", replied, "", _body(envelope)

    socket = {
        403: (foreign, _json(build_refusal_ref(403))),
        426: (no_upgrade, _json(build_refusal_ref(426))),
        429: refused[429],
        503: refused[503],
    }
    yield (
        "/ws",
        "get",
        "Decentrl",
        "Decentrl WebSocket, or DIDComm by its first message",
        {**opened, **socket},
        _DECENTRL_SOCKET_DESCRIPTION,
        {},
    )

    events = {200: ("A page of events; empty for an unknown publisher.", _json(build_ref("PublicEvents")))}
    about = "All filters must match; one of several tags is sufficient. Bounds are inclusive."
    more = {"parameters": _list_channel_parameters()}
    yield "/public/{did}", "get", "Decentrl", "A public channel", {**events, **refused}, about, more

    about = "JSON, or an HTML page with a QR code, by the Accept header."
    invitation = {200: (about, {_JSON_TYPE: build_ref("Invitation"), _HTML_TYPE: str})}
    yield "/invitation", "get", "Mediator", "An out-of-band 2.0 invitation", invitation, "", oob
    v1 = {200: (about, {_JSON_TYPE: build_ref("V1Invitation"), _HTML_TYPE: str})}
    about = "Not found if DIDComm v1 is disabled."
    in_url = {"parameters": [_describe_parameter(name, build_schema(str)) for name in ("oob", "c_i")]}
    yield "/invitation/v1", "get", "Mediator", "An out-of-band 1.1 invitation, for DIDComm v1", v1, about, in_url
    found = {**invitation, 404: ("`_oobid` is not the id of the invitation.", trouble)}
    oob_id = {"parameters": [_describe_parameter("_oobid", build_schema(str))]}
    yield "/oob", "get", "Mediator", "The invitation by its short URL", found, "", oob_id
    for path, summary, media_type, shape in (
        ("/.well-known/did.json", "The document of the mediator's did:web", _JSON_TYPE, build_ref("DIDDocument")),
        ("/did", "The mediator's did:peer:2", _TEXT_TYPE, str),
        ("/invitationOOB", "The invitation as a URL that contains it", _TEXT_TYPE, str),
        ("/openapi.json", "The OpenAPI document", _JSON_TYPE, dict),
    ):
        yield path, "get", "Mediator", summary, {200: (f"{summary}.", {media_type: shape})}, "", {}

    health: Responses = {
        200: ("The mediator can serve requests.", _json({"status": "ok"})),
        **fault,
        503: ("The mediator cannot serve requests.", trouble),
    }
    yield "/health", "get", "Operation", "Whether the mediator can serve requests", health, "", {}
    cycle = ("The last probe succeeded.", _json({"status": "ok", "cycle_ms": _COUNT, "age_ms": _COUNT}))
    ready: Responses = {200: cycle, **fault, 503: ("The last probe failed.", _json(build_ref("Unready")))}
    yield "/ready", "get", "Operation", "Whether the end-to-end probe succeeds", ready, _PROBE_DESCRIPTION, {}
    metrics: Responses = {
        200: ("Prometheus' text format.", {CONTENT_TYPE: str}),
        403: ("Not allowed from this address.", trouble),
        **fault,
        503: ("Workers did not respond in time.", trouble),
    }
    about = "Also run the probe of `/ready`, which updates `mediator_ready`."
    parameter = {"name": "ready", "in": "query", "required": False, "description": about, "schema": build_schema(str)}
    yield (
        "/metrics",
        "get",
        "Operation",
        "Metrics in Prometheus' text format",
        metrics,
        "",
        {"parameters": [parameter]},
    )


def _json(shape: Any) -> Content:
    return {_JSON_TYPE: shape}


def _describe_response(status: int, about: str, content: Content) -> dict[str, Any]:
    described: dict[str, Any] = {"description": about}
    if status != 101 and CONTENT_TYPE not in content:
        retry = ["Retry-After", "Access-Control-Expose-Headers"] if status in _RETRY_STATUSES else []
        names = ["Access-Control-Allow-Origin", *retry]
        described["headers"] = {name: {"$ref": f"#/components/headers/{name}"} for name in names}
    if content:
        described["content"] = _describe_content(content)
    return described


def _body(content: Content) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": _describe_content(content)}}


def _describe_content(content: Content) -> dict[str, Any]:
    return {media_type: {"schema": build_schema(shape)} for media_type, shape in content.items()}


def _describe_commands() -> str:
    """The table of commands and their replies."""
    listed = {name.partition(" ")[0] for name in COMMAND_REPLIES}
    replies = COMMAND_REPLIES | {name: "Success" for name in list_command_names() if name not in listed}
    rows = [f"| `{command}` | `{reply}` |" for command, reply in replies.items()]
    executed = "200 means that the command was executed and its effects are durable."
    return "\n".join([executed, "", "| command | reply |", "|---|---|", *rows])


def _describe_parameter(name: str, schema: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema, **more}


def _list_channel_parameters() -> list[dict[str, Any]]:
    did = {"type": "string", "pattern": "^did:", "maxLength": MAX_DID_CHARACTERS}
    query = PublicQuery.model_json_schema(schema_generator=_SchemaGenerator)["properties"]
    as_list = {"style": "form", "explode": False}
    return [
        {"name": "did", "in": "path", "required": True, "schema": did},
        *(
            _describe_parameter(name, schema, **(as_list if schema.get("type") == "array" else {}))
            for name, schema in query.items()
        ),
    ]


def _list_post_refusals() -> dict[int, tuple[str, Content]]:
    """Errors of both protocols."""
    refusals = _list_didcomm_refusals()
    for status in {wire.status for wire in DECENTRL_ERROR_CODES.values()}:
        about, content = refusals.get(status, ("Rejected.", {}))
        both = [build_refusal_ref(status), *([content[_JSON_TYPE]] if _JSON_TYPE in content else [])]
        refusals[status] = about, {**content, _JSON_TYPE: Schema(anyOf=both) if len(both) > 1 else both[0]}
    return refusals


def _list_didcomm_refusals() -> dict[int, tuple[str, Content]]:
    """Problem reports, encrypted or signed where possible; errors before a message was read are JSON."""
    wires = DIDCOMM_ERROR_CODES.values()
    refusals: dict[int, tuple[str, Content]] = {}
    for status in {status for wire in wires for status in (wire.status, wire.encrypted_status or 400)}:
        if status >= 400:
            content: dict[str, Any] = {PLAINTEXT_MEDIA_TYPE: build_ref("ProblemReport")}
            if any(wire.is_signed for wire in wires if wire.status == status):
                content[SIGNED_TYPE] = build_ref("JWS")
            if any(wire.encrypted_status == status for wire in wires):
                content[ENCRYPTED_MEDIA_TYPE] = build_ref("JWE")
            if status in _JSON_ERROR_STATUSES:
                content[_JSON_TYPE] = build_ref("Trouble")
            refusals[status] = "Rejected.", content
    return refusals


OPENAPI_JSON = files("mediatord.http").joinpath("openapi.json").read_bytes()


if __name__ == "__main__":
    Path(__file__).with_name("openapi.json").write_text(render_openapi_document(), encoding="utf-8")
