"""
The schemas of the OpenAPI document: those of requests come from the models that check them, those of answers from the
tables that these are made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from mediatord.protocol.decentrl.commands import DirectCommand, PrivateCommand, PublicCommand
from mediatord.protocol.decentrl.queries import PublicQuery
from mediatord.protocol.decentrl.shapes import AuthenticateMessage, DirectPayload, PublicPayload
from mediatord.wire import DECENTRL_WIRE, IDENTUS_CODES, SOCKET_WIRE, WIRE

Schema = dict[str, Any]

COMMANDS = ("DirectCommand", "PrivateCommand", "PublicCommand")
# Refusals that are none of a command, by status (reference section 12).
PLAIN_CODES = {
    **{400: "BAD_REQUEST", 403: "ORIGIN_NOT_ALLOWED", 404: "NOT_FOUND"},
    **{405: "METHOD_NOT_ALLOWED", 426: "UPGRADE_REQUIRED"},
}
TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}


def ref(name: str) -> Schema:
    """A schema that stands among the components."""
    return {"$ref": f"#/components/schemas/{name}"}


def one_of(names: Sequence[str]) -> Schema:
    """Any of several components."""
    return {"anyOf": [ref(name) for name in names]}


def constant(value: str) -> Schema:
    """A text that is always the same."""
    return {"type": "string", "const": value}


def codes(*values: str) -> Schema:
    """One of some texts."""
    return {"type": "string", "enum": sorted(set(values))}


def record(members: Mapping[str, Schema], *, about: str = "", optional: Mapping[str, Schema] | None = None) -> Schema:
    """An object of ours: these members and no others."""
    return {
        **({"description": about} if about else {}),
        "type": "object",
        "properties": {**members, **(optional or {})},
        "required": list(members),
        "additionalProperties": False,
    }


def refused_with(status: int) -> Schema:
    """A refusal with this status that is not DIDComm's."""
    return ref(f"Refused{status}")


def components() -> dict[str, Schema]:
    """All schemas that have a name."""
    return {**_requests(), **_answers(), **_refusals(), **_replies(), **_frames(), **_didcomm()}


def parameters() -> dict[str, Schema]:
    """The schemas of what a reader of a public channel may ask for, by name."""
    shown = PublicQuery.model_json_schema(schema_generator=_Schemas)
    properties: dict[str, Schema] = shown["properties"]
    return properties


class _Schemas(GenerateJsonSchema):
    """Without the titles that only repeat a name, and without defaults that only say that a member may be absent."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Never."""
        return False

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        """Of values only: what is absent is not null, and an absent object has the defaults of its members."""
        shown = super().default_schema(schema)
        if schema.get("default") is None or isinstance(schema.get("default"), BaseModel):
            shown.pop("default", None)
        return shown


def _requests() -> dict[str, Schema]:
    models: tuple[type[BaseModel], ...] = (DirectCommand, PrivateCommand, PublicCommand, AuthenticateMessage)
    _, shown = models_json_schema(
        [(model, "validation") for model in models],
        ref_template="#/components/schemas/{model}",
        schema_generator=_Schemas,
    )
    found: dict[str, Schema] = shown["$defs"]
    return found


def _refusals() -> dict[str, Schema]:
    """By status, and all in one."""
    named = [(wire.status, wire.code) for wire in DECENTRL_WIRE.values()] + list(PLAIN_CODES.items())
    by_status = {
        f"Refused{status}": _error(code for at, code in named if at == status) for status, _ in sorted(named)
    }
    return {"Error": _error(code for _, code in named), **by_status}


def _error(named: Iterable[str]) -> Schema:
    return record({"type": constant("ERROR"), "code": codes(*named)})


def _answers() -> dict[str, Schema]:
    return {
        "Trouble": record(
            {"status": constant("error"), "detail": TEXT}, about="A refusal for people, where no protocol has a form."
        ),
        "Unready": record(
            {"status": constant("error"), "detail": TEXT}, optional={"age_ms": {"type": "integer", "minimum": 0}}
        ),
        "DIDDocument": {
            "description": "The mediator's DID document (DCTRL-0004 3.2, with additions for DIDComm).",
            "type": "object",
            "required": ["@context", "id", "verificationMethod", "keyAgreement", "authentication", "service"],
        },
        "Page": record({name: {"type": "integer", "minimum": 0} for name in ("page", "page_size", "total")}),
        "PublicEvents": record(
            {
                "publisher_did": TEXT,
                "events": _list(
                    {"id": TEXT, "event": TEXT, "tags": _texts(), "timestamp": NUMBER, "event_signature": TEXT},
                    {"channel_id": TEXT},
                ),
                "pagination": ref("Page"),
            },
            about="A page of a public channel, newest first (reference 10.3).",
        ),
    }


# What each command is answered with when it succeeds; all others get a bare Success.
REPLIES = {
    "REQUEST_COMMUNICATION_CONTRACT to the mediator": "Registered",
    "REQUEST_COMMUNICATION_CONTRACT to an identity": "Requested",
    "QUERY_PENDING_COMMUNICATION_CONTRACT_REQUESTS": "PendingContractRequestsPage",
    "QUERY_COMMUNICATION_CONTRACTS": "ContractsPage",
    "QUERY_PENDING_EVENTS": "PendingEventsPage",
    "QUERY_EVENTS": "EventsPage",
    "TWO_WAY_PRIVATE": "Delivered",
    "PUBLISH_PUBLIC_EVENT": "Published",
}
SUCCESS = "Success"


def command_names() -> list[str]:
    """The types of all commands that have one."""
    models = (*get_args(DirectPayload), *get_args(PublicPayload))
    return [get_args(model.model_fields["type"].annotation)[0] for model in models]


def _replies() -> dict[str, Schema]:
    contract = ref("SignedCommunicationContract")
    request = {"encrypted_contract_request": TEXT, "requestor_ephemeral_public_key": TEXT}
    return {
        SUCCESS: _success({}),
        "Registered": _success(
            {
                "code": constant("MEDIATOR_REGISTRATION_SUCCESS"),
                "payload": record({"signed_communication_contract": contract}),
            }
        ),
        "Requested": _success({"code": constant("REQUESTED")}),
        "Delivered": _success({"pendingEventId": TEXT}),
        "Published": _success({"public_event_id": TEXT}),
        "PendingContractRequestsPage": _page(
            "pending_communication_contract_requests", {"id": TEXT, "sender_did": TEXT, **request}
        ),
        "ContractsPage": _page("communication_contracts", {"id": TEXT, "signed_communication_contract": contract}),
        "PendingEventsPage": _page("pending_events", {"id": TEXT, "payload": TEXT, "sender_did": TEXT}),
        "EventsPage": _page("events", {"id": TEXT, "payload": TEXT, "encrypted_tags": _texts(), "timestamp": NUMBER}),
    }


def _frames() -> dict[str, Schema]:
    """What is sent on a Decentrl socket (DCTRL-0004 section 10)."""
    event = {"id": TEXT, "sender_did": TEXT, "payload": TEXT}
    return {
        "AuthSuccess": record({"type": constant("AUTH_SUCCESS")}),
        "AuthFailed": record(
            {"type": constant("AUTH_FAILED"), "code": codes(*(wire.code for wire in SOCKET_WIRE.values()))}
        ),
        "Ping": record({"type": constant("PING"), "timestamp": {"type": "integer"}}),
        "PendingEventsPushed": record({"type": constant("PENDING_EVENTS"), "events": _list(event)}),
        "ContractsUpdated": record({"type": constant("CONTRACTS_UPDATED")}),
    }


def _didcomm() -> dict[str, Schema]:
    message = {"id": TEXT, "type": TEXT, "body": {"type": "object"}}
    problem_codes = codes(*(wire.code for wire in WIRE.values()), *IDENTUS_CODES.values())
    return {
        "JWE": {
            "description": "A DIDComm v2 encrypted message: a JWE in general JSON serialization.",
            "type": "object",
            "properties": {
                **dict.fromkeys(("protected", "iv", "ciphertext", "tag"), TEXT),
                "recipients": {"type": "array", "items": {"type": "object"}, "minItems": 1},
            },
            "required": ["protected", "recipients", "iv", "ciphertext", "tag"],
        },
        "JWS": {
            "description": "A DIDComm v2 signed message: a JWS in general JSON serialization.",
            "type": "object",
            "properties": {
                "payload": TEXT,
                "signatures": {"type": "array", "items": {"type": "object"}, "minItems": 1},
            },
            "required": ["payload", "signatures"],
        },
        "ProblemReport": {
            "description": "A problem report 2.0 in the clear, for a sender whose key is not known.",
            "type": "object",
            "properties": {
                **message,
                "type": constant("https://didcomm.org/report-problem/2.0/problem-report"),
                "body": {
                    "type": "object",
                    "properties": {"code": problem_codes, "comment": TEXT},
                    "required": ["code", "comment"],
                },
            },
            "required": list(message),
        },
        "Invitation": {
            "description": "An out-of-band 2.0 invitation to ask for mediation.",
            "type": "object",
            "properties": {
                **message,
                "type": constant("https://didcomm.org/out-of-band/2.0/invitation"),
                "from": TEXT,
            },
            "required": [*message, "from"],
        },
    }


def _success(members: Mapping[str, Schema]) -> Schema:
    return record({"type": constant("SUCCESS"), **members})


def _page(name: str, members: Mapping[str, Schema]) -> Schema:
    return _success({"payload": record({name: _list(members), "pagination": ref("Page")})})


def _list(members: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    return {"type": "array", "items": record(members, optional=optional)}


def _texts() -> Schema:
    return {"type": "array", "items": TEXT}
