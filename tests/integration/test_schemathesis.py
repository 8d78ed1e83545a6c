"""
Whatever the OpenAPI document allows, and much that it does not, is sent to a live daemon: it may refuse anything, but
it never fails, and what it answers is what the document says.

Most commands are sent by somebody registered, now, to whom they are for, and signed: those of strangers never get
past authentication.
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
from mediatord.protocol.decentrl.crypto import decode_public_key
from mediatord.wallet.decentrl_client import (
    DIRECT_CHANNEL,
    PRIVATE_CHANNEL,
    PUBLIC_CHANNEL,
    DecentrlIdentity,
    compose_command,
    propose_contract,
)
from tests.integration.daemon import Daemon

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
# Beside all cases at the edge of the schemas, which are about a thousand.
EXAMPLES = 40
# After which the daemon is stuck.
SECONDS = 120
# What fits into a request line, which has 16 KiB at most.
LONGEST_URL = 16_000
JSON = "application/json"

# Not made from the document itself: that would work out all cases in every process that only collects tests.
operations = schemathesis.pytest.from_fixture("document")


class DaemonWithIdentities:
    """
    A daemon, and two identities that are registered there and have contracts with each other.

    :ivar carried_out: the types of commands that Alice gave and the daemon carried out.
    """

    def __init__(self, daemon: Daemon) -> None:
        self.url = daemon.url
        self.carried_out: set[str] = set()
        document = requests.get(self.url, timeout=SECONDS).json()
        self._did: str = document["id"]
        self._prekey = decode_public_key(document["keyAgreement"][0]["publicKeyMultibase"])
        self._alice, self._bob = (DecentrlIdentity.generate(name, self._did) for name in ("alice", "bob"))
        for one in (self._alice, self._bob):
            self._do(one, DIRECT_CHANNEL, propose_contract(one, self._did, now()).payload(self._prekey))
        for one in (self._alice, self._bob):
            self._do(one, DIRECT_CHANNEL, {"type": "SAVE_COMMUNICATION_CONTRACT", **self._contract()})

    def from_alice(self, command: dict[str, Any]) -> dict[str, Any]:
        """The same command from Alice, now, to whom it is for, and signed; unknown members stay."""
        command = deepcopy(command)
        header, payload = command["header"], command["payload"]
        to, channel = self._addressed(payload)
        self._fill(payload, to)
        header.update(compose_command(self._alice, channel, to, payload, int(now() * 1000))["header"])
        return {**command, "signature": self._alice.sign({"header": header, "payload": payload})}

    def _addressed(self, payload: Any) -> tuple[str, ChannelType]:
        """Events go to Bob, and about half of the requests for a contract; everything else to the mediator."""
        if isinstance(payload, str):
            return self._bob.did, PRIVATE_CHANNEL
        kind = type_of(payload)
        if kind == "REQUEST_COMMUNICATION_CONTRACT" and lot(payload) % 2:
            return self._bob.did, DIRECT_CHANNEL
        return self._did, PUBLIC_CHANNEL if kind in (
            "PUBLISH_PUBLIC_EVENT",
            "DELETE_PUBLIC_EVENT",
        ) else DIRECT_CHANNEL

    def _fill(self, payload: Any, to: str) -> None:
        """Put in what only somebody with keys can say, and ids that there are."""
        kind = type_of(payload)
        if kind == "REQUEST_COMMUNICATION_CONTRACT" and to == self._did:
            payload.update(propose_contract(self._alice, to, now()).payload(self._prekey))
        elif kind in ("SAVE_COMMUNICATION_CONTRACT", "COMMUNICATION_CONTRACT_RESPONSE"):
            payload.update(self._contract())
        elif kind == "PUBLISH_PUBLIC_EVENT":
            payload["event_signature"] = self._signed_event(payload)
        elif kind == "DELETE_PUBLIC_EVENT":
            event = {"type": "PUBLISH_PUBLIC_EVENT", "event": "", "tags": [], "timestamp": 1}
            published = self._do(self._alice, PUBLIC_CHANNEL, {**event, "event_signature": self._signed_event(event)})
            payload["public_event_id"] = published["public_event_id"]

    def _signed_event(self, event: dict[str, Any]) -> str:
        signed = ("channel_id", "event", "tags", "timestamp")
        return self._alice.sign({name: event[name] for name in signed if name in event})

    def _contract(self) -> dict[str, Any]:
        """A contract between Alice and Bob, another one each time."""
        terms = dict(propose_contract(self._alice, self._bob.did, now()).request["communication_contract"])
        terms["recipient_encryption_public_key"] = terms["requestor_encryption_public_key"]
        signed = {
            "communication_contract": terms,
            "requestor_signature": sign_contract(terms, self._alice.seed),
            "recipient_signature": sign_contract(terms, self._bob.seed),
        }
        return {"signed_communication_contract": signed}

    def _do(self, who: DecentrlIdentity, channel: ChannelType, payload: dict[str, Any]) -> dict[str, Any]:
        command = compose_command(who, channel, self._did, payload, int(now() * 1000))
        answer = requests.post(self.url, json=command, timeout=SECONDS)
        assert answer.status_code == 200, answer.text
        reply: dict[str, Any] = answer.json()
        return reply


def now() -> float:
    """Unix seconds."""
    return datetime.now(UTC).timestamp()


def type_of(payload: Any) -> str | None:
    """What a payload says it is."""
    return payload.get("type") if isinstance(payload, dict) else None


def lot(value: Any) -> int:
    """A number, always the same for the same value."""
    return crc32(repr(value).encode("utf-8", "surrogatepass"))


def is_for_alice(case: schemathesis.Case[Any]) -> bool:
    """Whether it is a command that she may say: three out of four of those that have a header and a payload."""
    if (case.method, case.path, case.media_type) != ("POST", "/", JSON) or not isinstance(case.body, dict):
        return False
    return isinstance(case.body.get("header"), dict) and "payload" in case.body and lot(case.body) % 4 != 0


def url_length(case: schemathesis.Case[Any], base_url: str) -> int:
    """Of the URL as it is sent."""
    return len(requests.Request(**case.as_transport_kwargs(base_url)).prepare().url or "")


@pytest.fixture
def document(request: pytest.FixtureRequest) -> BaseSchema:
    """What the daemon says of itself."""
    # Schemathesis names its cases by an attribute that pytest 9.2 has no more.
    cast(Any, request.node)._nodeid = request.node.nodeid
    return schemathesis.openapi.from_dict(json.loads(OPENAPI_JSON))


@pytest.fixture(scope="module")
def town() -> Iterator[DaemonWithIdentities]:
    """One for all operations, with caps that they do not reach."""
    plenty = {"max_contracts_per_peer": 100_000, "max_contract_requests_per_sender": 100_000}
    with Daemon({"decentrl": plenty}) as daemon:
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
def test_operation(case: schemathesis.Case[Any], town: DaemonWithIdentities) -> None:
    """No request makes the daemon fail, and no answer is other than documented; what is right is carried out."""
    assume(url_length(case, town.url) < LONGEST_URL)
    is_right = case.meta is not None and case.meta.generation.mode.is_positive
    if is_for_alice(case):
        command = town.from_alice(cast(dict[str, Any], case.body))
        case.body = command
        answer = case.call(base_url=town.url, timeout=SECONDS)
        assert not is_right or answer.status_code in (200, 413)
        if answer.status_code == 200:
            town.carried_out.add(type_of(command["payload"]) or PRIVATE_CHANNEL)
    else:
        answer = case.call(base_url=town.url, timeout=SECONDS)
    case.validate_response(answer, checks=CHECKS)


def test_every_command_came_through(town: DaemonWithIdentities) -> None:
    """The cases of the test above are not all refused at the door: commands of every type were carried out."""
    if not town.carried_out:
        pytest.skip("there are only figures when all operations have been tested, in the same run")
    models = (*get_args(DirectPayload), *get_args(PublicPayload))
    names = {get_args(model.model_fields["type"].annotation)[0] for model in models}
    assert town.carried_out == names | {PRIVATE_CHANNEL}
