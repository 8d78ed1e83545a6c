"""The OpenAPI document matches the daemon."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema_rs import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator
from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import InvalidCommand
from mediatord.http.openapi import HTTP_ERROR_CODES, OPENAPI_JSON, render_openapi_document
from mediatord.protocol.decentrl.commands import parse_authentication_request, parse_command
from mediatord.protocol.error_codes import DECENTRL_CLOSE_CODES, DECENTRL_ERROR_CODES, DIDCOMM_ERROR_CODES
from tests.http.in_memory_site import HTTPResponse, InMemorySite
from tests.protocol.decentrl.samples import CHANNELS, authenticate, command

DOCUMENT: dict[str, Any] = json.loads(OPENAPI_JSON)
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]
# Path of the document of a did:web with a path, behind a proxy that strips the path: an alias of a page.
ALIASES = {"/did.json"}


def schema_validator(name: str) -> Draft202012Validator:
    """Return a validator of a schema of the document."""
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]})


KINDS = [schema_validator(name) for name in ("DirectCommand", "PrivateCommand", "PublicCommand")]
MISSING = object()
TEXTS = ["", "a", "é", " ", "a b", "did:x:y", "a\n", "x" * 1024, "x" * 1025, "x" * 2048, "x" * 2049, "x" * 2305]
NUMBERS = [-1, 0, 1, 1.0, 0.5, 1000, 1001, 1e300, -1e300, 2**53 - 1, 2**53, float(2**53)]
LISTS: list[Any] = [[], {}, [1], [None], {"a": 1}, ["x"] * 1000, ["x"] * 1001, ["x" * 1025], [[]]]
VALUES = [None, True, False, *TEXTS, *NUMBERS, *LISTS, *sorted(CHANNELS), *sorted(CHANNELS.values())]


def parses_as_command(document: Any) -> bool:
    """Whether the daemon accepts the document as a command."""
    try:
        parse_command(json.dumps(document).encode())
    except InvalidCommand:
        return False
    return True


def members(value: Any) -> Iterator[tuple[Any, str | int]]:
    """Yield every member and item at any depth, as container and key."""
    for name in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, name
        yield from members(value[name])


def test_document_is_up_to_date() -> None:
    """The served document is what `python -m mediatord.http.openapi` generates from the models."""
    assert OPENAPI_JSON.decode() == render_openapi_document()


def test_document_is_valid() -> None:
    """The document is valid OpenAPI 3.1, and its schemas are valid JSON Schema."""
    assert DOCUMENT["openapi"].startswith("3.1.")
    assert [error.message for error in OpenAPIV31SpecValidator(DOCUMENT).iter_errors()] == []


def test_error_codes_are_complete() -> None:
    """The codes of each status are those of the daemon's tables; together they are all error codes."""
    listed: dict[int, set[str]] = {status: {code} for status, code in HTTP_ERROR_CODES.items()}
    for wire in DECENTRL_ERROR_CODES.values():
        listed.setdefault(wire.status, set()).add(wire.code)
    for status, codes in listed.items():
        assert set(SCHEMAS[f"Refused{status}"]["properties"]["code"]["enum"]) == codes
    assert set(SCHEMAS["Error"]["properties"]["code"]["enum"]) == set().union(*listed.values())
    assert set(SCHEMAS["AuthFailed"]["properties"]["code"]["enum"]) == {
        wire.code for wire in DECENTRL_CLOSE_CODES.values()
    }


def test_statuses_are_complete() -> None:
    """Each status of either protocol's tables is listed with its operation."""
    decentrl = {str(wire.status) for wire in DECENTRL_ERROR_CODES.values()}
    didcomm = {
        str(status)
        for wire in DIDCOMM_ERROR_CODES.values()
        for status in (wire.status, wire.encrypted_status)
        if status
    }
    paths = DOCUMENT["paths"]
    assert set(paths["/didcomm"]["post"]["responses"]) == didcomm | {"200", "202"}
    assert set(paths["/"]["post"]["responses"]) == decentrl | didcomm | {"200", "202"}


@pytest.mark.parametrize("name", sorted(CHANNELS))
def test_commands_have_schemas_and_replies(name: str) -> None:
    """Each command has a schema, and a row in the table of replies that names one."""
    assert any(kind.is_valid(command(name)) for kind in KINDS)
    rows = [line.split("`") for line in DOCUMENT["paths"]["/"]["post"]["description"].splitlines()]
    replies = [row[3] for row in rows if len(row) == 5 and row[1].partition(" ")[0] == name]
    assert replies
    assert set(replies) <= set(SCHEMAS)


@pytest.mark.parametrize("name", sorted(CHANNELS))
def test_schema_and_parser_agree(name: str) -> None:
    """Schema and parser agree when any member is missing or has another value."""
    for number in range(len(list(members(command(name))))):
        for value in (MISSING, *VALUES):
            document = command(name)
            holder, member = list(members(document))[number]
            if value is not MISSING:
                holder[member] = value
            elif isinstance(holder, dict):
                del holder[member]
            # A schema cannot express that the parties of a contract differ.
            if "requestor_did" not in holder or holder["requestor_did"] != holder.get("recipient_did"):
                allowed = any(kind.is_valid(document) for kind in KINDS)
                assert parses_as_command(document) is allowed, (member, value)


def test_first_socket_frame_has_schema() -> None:
    """The first frame has a schema, which only the text refers to."""
    parse_authentication_request(json.dumps(authenticate()).encode())
    frame = schema_validator("AuthenticateMessage")
    assert frame.is_valid(authenticate())
    assert not frame.is_valid(authenticate(timestamp="now"))


class ServedTests(SynchronousTestCase):
    """Responses of a mediator to operations without prerequisites."""

    def setUp(self) -> None:
        self.site_fixture = InMemorySite(self)

    def assert_documented(self, response: HTTPResponse, path: str, method: str = "get") -> None:
        """The response is one that the document lists for the operation."""
        listed = DOCUMENT["paths"][path][method]["responses"]
        self.assertIn(str(response.status), listed)
        for name in listed[str(response.status)].get("headers", {}):
            self.assertIn(name.lower(), response.headers)
        content = listed[str(response.status)].get("content", {})
        if not content:
            self.assertNotIn("content-type", response.headers)
            return
        media_type = response.headers["content-type"].partition(";")[0]
        schemas = {name.partition(";")[0]: value["schema"] for name, value in content.items()}
        self.assertIn(media_type, schemas)
        body = json.loads(response.body) if media_type.endswith("json") else response.body.decode()
        checked = Draft202012Validator({**schemas[media_type], "components": DOCUMENT["components"]})
        self.assertEqual([error.message for error in checked.iter_errors(body)], [])

    def test_pages(self) -> None:
        """Each GET without parameters is documented, also metrics from a denied address."""
        for path, operations in DOCUMENT["paths"].items():
            if "get" in operations and "{" not in path:
                self.assert_documented(self.site_fixture.request("GET", path), path)
        self.assert_documented(self.site_fixture.request("GET", "/metrics", peer="127.0.0.1"), "/metrics")
        self.assert_documented(
            self.site_fixture.request("GET", "/invitation", headers={"Accept": "text/html"}), "/invitation"
        )
        self.assert_documented(self.site_fixture.request("GET", "/?_oob=x"), "/")

    def test_document_is_served_unchanged(self) -> None:
        """`/openapi.json` serves the document as it is."""
        self.assertEqual(self.site_fixture.request("GET", "/openapi.json").body, OPENAPI_JSON)

    def test_public_channels(self) -> None:
        """Unknown DIDs and invalid parameters get documented responses."""
        for query, status in (("", 200), ("?tags=a,b&page_size=7", 200), ("?page=x", 400)):
            response = self.site_fixture.request("GET", f"/public/did:example:a{query}")
            self.assertEqual(response.status, status)
            self.assert_documented(response, "/public/{did}")

    def test_refusals(self) -> None:
        """Invalid messages and commands get documented responses."""
        self.assert_documented(self.site_fixture.post(b"{}"), "/didcomm", "post")
        self.assert_documented(self.site_fixture.post(b"{}", "/"), "/", "post")
        for body in (b"{}", json.dumps(command("QUERY_EVENTS")).encode()):
            response = self.site_fixture.request("POST", "/", body, {"Content-Type": "application/json"})
            self.assertIn(response.status, (400, 401))
            self.assert_documented(response, "/", "post")

    def test_all_paths_and_methods_are_documented(self) -> None:
        """All paths are in the document, with all methods but OPTIONS and HEAD."""
        root = self.site_fixture.site.resource
        served = {f"/{name.decode()}" for name in root.listNames()} - ALIASES
        listed = {"/" + path.split("/")[1] for path in DOCUMENT["paths"]} - {"/"}
        self.assertEqual(served, listed)
        for path, operations in DOCUMENT["paths"].items():
            response = self.site_fixture.request("PUT", path)
            if response.status == 405:
                allowed = set(response.headers["allow"].lower().split(", ")) - {"options", "head"}
                self.assertLessEqual(allowed, set(operations))
