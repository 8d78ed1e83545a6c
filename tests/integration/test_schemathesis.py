"""
Sends what the OpenAPI document allows, and much that it does not, to a running daemon: it may refuse anything, but
never fails, and its responses match the document.

Most commands are from a registered identity, with the current time and the right recipient, and signed: others fail
authentication.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from datetime import UTC, datetime
from typing import Any, cast, get_args
from zlib import crc32

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, assume, settings
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from mediatord.http.openapi import OPENAPI_JSON
from mediatord.protocol.decentrl.commands import ChannelType, DirectPayload, PublicPayload
from mediatord.protocol.decentrl.contracts import sign_contract
from mediatord.protocol.decentrl.crypto import decode_public_key, derive_shared_secret, encrypt, generate_key_pair
from mediatord.protocol.encoding import encode_base64
from mediatord.wallet.decentrl_client import (
    DIRECT_CHANNEL,
    PRIVATE_CHANNEL,
    PUBLIC_CHANNEL,
    DecentrlIdentity,
    compose_command,
    propose_contract,
)
from mediatord.wallet.temporary_daemon import make_vapid_key
from tests.integration.daemon import Daemon
from tests.integration.message_load import prepare_daemon
from tests.push.registries import make_subscription

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
# In addition to about a thousand boundary cases of the schemas.
EXAMPLES = 40
# Time-out of a request.
SECONDS = 120
# Fits into a request line, which has at most 16 KiB.
LONGEST_URL = 16_000
JSON = "application/json"

# A fixture, as building it at import would generate all cases in every process that collects tests.
operations = schemathesis.pytest.from_fixture("document")


class DaemonWithIdentities:
    """
    A daemon, and two identities registered there with contracts between them.

    :ivar carried_out: types of Alice's commands that succeeded.
    """

    def __init__(self, daemon: Daemon) -> None:
        self.url = daemon.url
        self.carried_out: set[str] = set()
        document = requests.get(self.url, timeout=SECONDS).json()
        self._did: str = document["id"]
        self._prekey = decode_public_key(document["keyAgreement"][0]["publicKeyMultibase"])
        self._alice, self._bob = (DecentrlIdentity.generate(name, self._did) for name in ("alice", "bob"))
        for one in (self._alice, self._bob):
            self._send(one, DIRECT_CHANNEL, propose_contract(one, self._did, now()).payload(self._prekey))
        for one in (self._alice, self._bob):
            self._send(one, DIRECT_CHANNEL, {"type": "SAVE_COMMUNICATION_CONTRACT", **self._make_contract()})

    def complete_command(self, command: dict[str, Any]) -> dict[str, Any]:
        """The command from Alice, with the current time and the right recipient, and signed; unknown members stay."""
        command = deepcopy(command)
        header, payload = command["header"], command["payload"]
        to, channel = self._address(payload)
        self._complete_payload(payload, to)
        header.update(compose_command(self._alice, channel, to, payload, int(now() * 1000))["header"])
        return {**command, "signature": self._alice.sign({"header": header, "payload": payload})}

    def _address(self, payload: Any) -> tuple[str, ChannelType]:
        """Events go to Bob, as do about half of the contract requests; other commands go to the mediator."""
        if isinstance(payload, str):
            return self._bob.did, PRIVATE_CHANNEL
        kind = type_of(payload)
        if kind == "REQUEST_COMMUNICATION_CONTRACT" and stable_hash(payload) % 2:
            return self._bob.did, DIRECT_CHANNEL
        return self._did, PUBLIC_CHANNEL if kind in (
            "PUBLISH_PUBLIC_EVENT",
            "DELETE_PUBLIC_EVENT",
        ) else DIRECT_CHANNEL

    def _complete_payload(self, payload: Any, to: str) -> None:
        """Add members that need keys, and existing ids."""
        kind = type_of(payload)
        if kind == "REQUEST_COMMUNICATION_CONTRACT" and to == self._did:
            payload.update(propose_contract(self._alice, to, now()).payload(self._prekey))
        elif kind in ("SAVE_COMMUNICATION_CONTRACT", "COMMUNICATION_CONTRACT_RESPONSE"):
            payload.update(self._make_contract())
        elif kind == "PUBLISH_PUBLIC_EVENT":
            payload["event_signature"] = self._signed_event(payload)
        elif kind == "DELETE_PUBLIC_EVENT":
            event = {"type": "PUBLISH_PUBLIC_EVENT", "event": "", "tags": [], "timestamp": 1}
            published = self._send(
                self._alice, PUBLIC_CHANNEL, {**event, "event_signature": self._signed_event(event)}
            )
            payload["public_event_id"] = published["public_event_id"]
        elif kind in ("SET_PUSH_DEVICE", "QUERY_PUSH_DEVICES"):
            private, public = generate_key_pair()
            payload["sender_ephemeral_public_key"] = encode_base64(public)
            if kind == "SET_PUSH_DEVICE":
                device = json.dumps({"service": "web_push", **make_subscription()}).encode()
                secret = derive_shared_secret(private, self._prekey)
                payload["encrypted_push_device"] = encrypt(device, secret)

    def _signed_event(self, event: dict[str, Any]) -> str:
        signed = ("channel_id", "event", "tags", "timestamp")
        return self._alice.sign({name: event[name] for name in signed if name in event})

    def _make_contract(self) -> dict[str, Any]:
        """A new contract between Alice and Bob."""
        terms = dict(propose_contract(self._alice, self._bob.did, now()).request["communication_contract"])
        terms["recipient_encryption_public_key"] = terms["requestor_encryption_public_key"]
        signed = {
            "communication_contract": terms,
            "requestor_signature": sign_contract(terms, self._alice.seed),
            "recipient_signature": sign_contract(terms, self._bob.seed),
        }
        return {"signed_communication_contract": signed}

    def _send(self, identity: DecentrlIdentity, channel: ChannelType, payload: dict[str, Any]) -> dict[str, Any]:
        command = compose_command(identity, channel, self._did, payload, int(now() * 1000))
        answer = requests.post(self.url, json=command, timeout=SECONDS)
        assert answer.status_code == 200, answer.text
        reply: dict[str, Any] = answer.json()
        return reply


def now() -> float:
    """Unix seconds."""
    return datetime.now(UTC).timestamp()


def type_of(payload: Any) -> str | None:
    """The type of a payload."""
    return payload.get("type") if isinstance(payload, dict) else None


def stable_hash(value: Any) -> int:
    """The same number for the same value."""
    return crc32(repr(value).encode("utf-8", "surrogatepass"))


def is_for_alice(case: schemathesis.Case[Any]) -> bool:
    """Whether to complete it as Alice's command: three of four cases with header and payload."""
    if (case.method, case.path, case.media_type) != ("POST", "/", JSON) or not isinstance(case.body, dict):
        return False
    return isinstance(case.body.get("header"), dict) and "payload" in case.body and stable_hash(case.body) % 4 != 0


def url_length(case: schemathesis.Case[Any], base_url: str) -> int:
    """Length of the URL as sent."""
    return len(requests.Request(**case.as_transport_kwargs(base_url)).prepare().url or "")


@pytest.fixture
def document(request: pytest.FixtureRequest) -> BaseSchema:
    """The daemon's OpenAPI document."""
    # Schemathesis names its cases by an attribute that pytest 9.2 no longer has.
    cast(Any, request.node)._nodeid = request.node.nodeid
    return schemathesis.openapi.from_dict(json.loads(OPENAPI_JSON))


@pytest.fixture(scope="module")
def registered_daemon() -> Iterator[DaemonWithIdentities]:
    """One daemon for all operations, with limits that they do not reach."""
    limits = {"max_contracts_per_peer": 100_000, "max_contract_requests_per_sender": 100_000}
    web_push = {"key_file": "vapid.pem", "contact": "mailto:admin@mediator.example"}
    prepared = prepare_daemon({"decentrl": limits, "push": {"decentrl": True, "web_push": web_push}})
    key = prepared.directory / "vapid.pem"
    key.touch(0o600)
    key.write_bytes(make_vapid_key())
    with prepared as daemon:
        yield DaemonWithIdentities(daemon)


@operations.parametrize()
@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_responses_match_document(case: schemathesis.Case[Any], registered_daemon: DaemonWithIdentities) -> None:
    """No request makes the daemon fail; valid commands succeed."""
    assume(url_length(case, registered_daemon.url) < LONGEST_URL)
    is_right = case.meta is not None and case.meta.generation.mode.is_positive
    if is_for_alice(case):
        command = registered_daemon.complete_command(cast(dict[str, Any], case.body))
        case.body = command
        response = case.call(base_url=registered_daemon.url, timeout=SECONDS)
        assert not is_right or response.status_code in (200, 413)
        if response.status_code == 200:
            registered_daemon.carried_out.add(type_of(command["payload"]) or PRIVATE_CHANNEL)
    else:
        response = case.call(base_url=registered_daemon.url, timeout=SECONDS)
    case.validate_response(response, checks=CHECKS)


def test_every_command_type_succeeds(registered_daemon: DaemonWithIdentities) -> None:
    """The cases above are not all refused: commands of every type were carried out."""
    if not registered_daemon.carried_out:
        pytest.skip("there are only figures when all operations have been tested, in the same run")
    models = (*get_args(DirectPayload), *get_args(PublicPayload))
    names = {get_args(model.model_fields["type"].annotation)[0] for model in models}
    assert registered_daemon.carried_out == names | {PRIVATE_CHANNEL}
