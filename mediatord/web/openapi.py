"""
The OpenAPI document of the public listener (contract section 3).

The copy that is served is kept beside this module; ``python -m mediatord.web.openapi`` writes it anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from mediatord.metrics import CONTENT_TYPE
from mediatord.protocol.decentrl.shapes import LONGEST_DID
from mediatord.protocol.didcomm.message import ENCRYPTED_TYPE, PLAIN_TYPE
from mediatord.protocol.didcomm.signed import MEDIA_TYPE as SIGNED_TYPE
from mediatord.web.schemas import (
    COMMANDS,
    REPLIES,
    SUCCESS,
    TEXT,
    Schema,
    command_names,
    components,
    constant,
    one_of,
    parameters,
    record,
    ref,
    refused_with,
)
from mediatord.wire import DECENTRL_WIRE, WIRE

Content = Mapping[str, Schema]

# Of the document, not of the daemon: what is described changes with neither's releases.
_VERSION = "1.0.0"
_JSON = "application/json"
_TEXT = "text/plain"
_HTML = "text/html"

_ABOUT = """
One listener for two protocols: DIDComm v2 at `/didcomm`, and Decentrl (DCTRL-0004, DCTRL-0007) at `/`,
`/public/{did}` and `/ws`.

`POST /` takes a body whose Content-Type says `didcomm` for a DIDComm message, and every other for a Decentrl
command; commands may have any other Content-Type, or none. A refusal outside `/didcomm` is
`{"type":"ERROR","code":...}`: besides those that are listed with an operation, 404 `NOT_FOUND` for a path that is
not here, 405 `METHOD_NOT_ALLOWED` with `Allow`, and 400 `BAD_REQUEST` for what is no HTTP.

A request line has 16 KiB at most. Pages of any origin may read all answers but those of `/metrics`; `OPTIONS`
answers 204 with `Access-Control-Allow-Methods` and `Access-Control-Allow-Headers` at every path. `HEAD` is answered
wherever `GET` is, but for the sockets.
"""
_SOCKET = """
With `Upgrade: websocket`. A first message that is a DIDComm envelope makes it the same as `/didcomm`. Otherwise it
has to be an `AuthenticateMessage`, as text, within ten seconds; it is signed over the canonical JSON of `did`,
`signing_key_id`, `timestamp` and `nonce`, and good for one socket. What follows is `AuthSuccess`, or `AuthFailed`
and the end. From then on there come a `Ping` every thirty seconds, `PendingEventsPushed` and `ContractsUpdated`.
What the client says is ignored. An event that is pushed waits until it is acknowledged by a command.
"""
_MESSAGES = """
With `Upgrade: websocket`: one DIDComm message in each frame, either way. Messages are pushed to a socket that has
asked for live delivery (Message Pickup 3.0).
"""
_HEADERS: Mapping[str, Schema] = {
    "Access-Control-Allow-Origin": {"required": True, "schema": constant("*")},
    "Access-Control-Expose-Headers": {"required": True, "schema": constant("Retry-After")},
    "Retry-After": {"description": "Seconds.", "required": True, "schema": {"type": "integer", "minimum": 0}},
}
# Where DIDComm says in JSON what went wrong before anything was read, and where it makes sense to come again.
_UNREAD = (500, 503)
_LATER = (429, 503)


def document() -> dict[str, Any]:
    """All of it."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mediatord",
            "version": _VERSION,
            "description": _ABOUT.strip(),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": name} for name in ("Decentrl", "DIDComm", "Mediator", "Operation")],
        "paths": {
            "/": {"get": _root(), "post": _post()},
            "/didcomm": {"get": _upgrade("DIDComm", _MESSAGES, {405: _response("Not an upgrade.")}), "post": _take()},
            "/ws": {"get": _upgrade("Decentrl", _SOCKET, {426: _json("Not an upgrade.", refused_with(426))})},
            "/public/{did}": {"get": _public()},
            "/.well-known/did.json": {
                "get": _page("The document of the mediator's did:web", _JSON, ref("DIDDocument"))
            },
            "/did": {"get": _page("The mediator's did:peer:2", _TEXT, TEXT)},
            "/invitation": {"get": _invitation()},
            "/invitationOOB": {"get": _page("The invitation as a URL", _TEXT, TEXT)},
            "/openapi.json": {"get": _page("This document", _JSON, {"type": "object"})},
            "/health": {"get": _health()},
            "/ready": {"get": _ready()},
            "/metrics": {"get": _metrics()},
        },
        "components": {"schemas": components(), "headers": _HEADERS},
    }


def text() -> str:
    """The copy that is kept."""
    return json.dumps(document(), indent=1, ensure_ascii=False) + "\n"


def _post() -> Schema:
    rows = [f"| `{command}` | `{reply}` |" for command, reply in REPLIES.items()]
    told = {name.partition(" ")[0] for name in REPLIES}
    rows += [f"| `{name}` | `{SUCCESS}` |" for name in command_names() if name not in told]
    table = "\n".join(["", "| command | reply |", "|---|---|", *rows])
    letters = {ENCRYPTED_TYPE: ref("JWE")}
    replies = {_JSON: one_of([SUCCESS, *dict.fromkeys(REPLIES.values())]), **letters}
    refused = {status: _didcomm_content(status) for status in _didcomm_statuses()}
    for status in {wire.status for wire in DECENTRL_WIRE.values()}:
        content = refused.get(status, {})
        both = [refused_with(status), *([content[_JSON]] if _JSON in content else [])]
        refused[status] = {**content, _JSON: {"anyOf": both} if len(both) > 1 else both[0]}
    return _operation(
        "Decentrl",
        "A Decentrl command, or a DIDComm message by its Content-Type",
        {200: _response("Done.", replies), 202: _accepted(), **_refusals(refused)},
        about="Answered with 200 when what was asked for is done and durable." + "\n" + table,
        requestBody=_body({_JSON: one_of(COMMANDS), **letters}),
    )


def _take() -> Schema:
    refused = {status: _didcomm_content(status) for status in _didcomm_statuses()}
    return _operation(
        "DIDComm",
        "A DIDComm message",
        {200: _response("A reply.", {ENCRYPTED_TYPE: ref("JWE")}), 202: _accepted(), **_refusals(refused)},
        requestBody=_body({ENCRYPTED_TYPE: ref("JWE")}),
    )


def _public() -> Schema:
    did = {"type": "string", "pattern": "^did:", "maxLength": LONGEST_DID}
    asked = [
        {
            "name": name,
            "in": "query",
            "schema": schema,
            **({"style": "form", "explode": False} if schema.get("type") == "array" else {}),
        }
        for name, schema in parameters().items()
    ]
    refused = {status: {_JSON: refused_with(status)} for status in (400, 429, 500, 503)}
    return _operation(
        "Decentrl",
        "A public channel",
        {
            200: _json("A page of it; of a publisher that is not known it is empty.", ref("PublicEvents")),
            **_refusals(refused),
        },
        about="All filters have to match; of the tags, which may be repeated, one is enough. Bounds are inclusive.",
        parameters=[{"name": "did", "in": "path", "required": True, "schema": did}, *asked],
    )


def _root() -> Schema:
    content = {_JSON: one_of(["DIDDocument", "Invitation"]), _HTML: TEXT}
    return _operation(
        "Mediator",
        "The mediator's DID document",
        {
            101: {"description": "With an upgrade, the same socket as at `/ws`."},
            200: _response("The document.", content),
            **_refusals({status: {_JSON: refused_with(status)} for status in _LATER}),
        },
        about="With `_oob`, which the URL of an invitation has, the same as `/invitation`.",
        parameters=[{"name": "_oob", "in": "query", "schema": TEXT}],
    )


def _invitation() -> Schema:
    content = {_JSON: ref("Invitation"), _HTML: TEXT}
    return _operation(
        "Mediator",
        "An out-of-band 2.0 invitation",
        {200: _response("For programs, or a page with a QR code for people, by what they accept.", content)},
        parameters=[{"name": "_oob", "in": "query", "schema": TEXT}],
    )


def _health() -> Schema:
    trouble = _json("It is not.", ref("Trouble"), retry=True)
    well = _json("It is.", record({"status": constant("ok")}))
    return _operation("Operation", "Whether the mediator can do its work", {200: well, 500: _fault(), 503: trouble})


def _ready() -> Schema:
    milliseconds = {"type": "integer", "minimum": 0}
    well = record({"status": constant("ok"), "cycle_ms": milliseconds, "age_ms": milliseconds})
    about = """
Asking begins to send a message through the mediator every few seconds, over its own listener. `cycle_ms` is how long
the last one took that got through, `age_ms` how long ago that was. `detail` names what failed: `store`, `listener`,
`socket`, `forward`, `push` or `acknowledgement`; or it says why nothing should be sent here.
"""
    return _operation(
        "Operation",
        "Whether messages get through",
        {200: _json("They do.", well), 500: _fault(), 503: _json("They do not.", ref("Unready"), retry=True)},
        about=about,
    )


def _metrics() -> Schema:
    shown = {"description": "Prometheus' text format.", "content": {CONTENT_TYPE: {"schema": TEXT}}}
    refused = _json("Not from this address.", ref("Trouble"))
    late = _json("Not in time.", ref("Trouble"), retry=True)
    asked = {"description": "Ask `/ready` as well, so that `mediator_ready` is among them.", "schema": TEXT}
    parameters = [{"name": "ready", "in": "query", "required": False, **asked}]
    responses = {200: shown, 403: refused, 500: _fault(), 503: late}
    return _operation("Operation", "Metrics", responses, parameters=parameters)


def _page(summary: str, media_type: str, schema: Schema) -> Schema:
    return _operation("Mediator", summary, {200: _response(f"{summary}.", {media_type: schema})})


def _upgrade(tag: str, about: str, otherwise: Mapping[int, Schema]) -> Schema:
    refused = {status: {_JSON: refused_with(status)} for status in (429, 503)}
    foreign: Content = {_JSON: refused_with(403)}
    if tag == "DIDComm":
        foreign = {_TEXT: TEXT}
        refused = {429: {_TEXT: TEXT}, 503: {_JSON: ref("Trouble")}}
    answers = {101: {"description": "It is open."}, 403: _response("The origin is not allowed.", foreign)}
    return _operation(tag, "A WebSocket", {**answers, **otherwise, **_refusals(refused)}, about=about)


def _operation(tag: str, summary: str, responses: Mapping[int, Schema], *, about: str = "", **more: Any) -> Schema:
    described = {"description": about.strip()} if about else {}
    numbered = {str(status): responses[status] for status in sorted(responses)}
    return {"tags": [tag], "summary": summary, **described, **more, "responses": numbered}


def _body(content: Content) -> Schema:
    return {"required": True, "content": _content(content)}


def _content(content: Content) -> dict[str, Any]:
    return {media_type: {"schema": schema} for media_type, schema in content.items()}


def _response(about: str, content: Content | None = None, *, retry: bool = False) -> Schema:
    names = ["Access-Control-Allow-Origin", *(["Retry-After", "Access-Control-Expose-Headers"] if retry else [])]
    headers = {name: {"$ref": f"#/components/headers/{name}"} for name in names}
    return {"description": about, "headers": headers, **({"content": _content(content)} if content else {})}


def _json(about: str, schema: Schema, *, retry: bool = False) -> Schema:
    return _response(about, {_JSON: schema}, retry=retry)


def _refusals(refused: Mapping[int, Content]) -> dict[int, Schema]:
    return {status: _response("Refused.", content, retry=status in _LATER) for status, content in refused.items()}


def _accepted() -> Schema:
    return _response("Accepted; there is no reply, or none on this connection.")


def _fault() -> Schema:
    return _json("A fault of the mediator's.", ref("Trouble"))


def _didcomm_statuses() -> list[int]:
    return sorted({status for wire in WIRE.values() for status in (wire.status, wire.packed or 400) if status >= 400})


def _didcomm_content(status: int) -> dict[str, Schema]:
    """
    A problem report, encrypted or signed where it can be; what is refused before anything is read is told in JSON.
    """
    content = {PLAIN_TYPE: ref("ProblemReport")}
    if status in {wire.status for wire in WIRE.values() if wire.signed}:
        content[SIGNED_TYPE] = ref("JWS")
    if status in {wire.packed for wire in WIRE.values()}:
        content[ENCRYPTED_TYPE] = ref("JWE")
    if status in _UNREAD:
        content[_JSON] = ref("Trouble")
    return content


OPENAPI = files("mediatord.web").joinpath("openapi.json").read_bytes()

if __name__ == "__main__":
    Path(__file__).with_name("openapi.json").write_text(text(), encoding="utf-8")
