"""The Decentrl wallet of demo, tests and benchmark: what it builds, and what it accepts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mediatord.identity.mediator_identity import make_mediator_document
from mediatord.protocol import encoding
from mediatord.protocol.decentrl.crypto import derive_shared_secret, encrypt, verify_json
from mediatord.protocol.decentrl.did_decentrl import parse_did
from mediatord.wallet import decentrl_client
from mediatord.wallet.decentrl_client import (
    ConcludedContract,
    ContractProposal,
    ContractRequest,
    DecentrlIdentity,
    accept_contract,
    conclude_contract,
    derive_public_key,
    open_event,
    propose_contract,
    read_mediator_document,
    seal_event,
)
from mediatord.wallet.didcomm_messages import UnreadableMessage

NOW = 1_800_000_000
MEDIATOR = "did:web:127.0.0.1%3A8080"
URL = "http://127.0.0.1:8080"
NONCE = "6f1c1d52-6a0b-4e0e-9a37-0d6f3a1b2c3d"
TIMESTAMP_MS = 1_760_000_000_000


def bytes_of(value: int) -> bytes:
    """A key of the published vectors: one byte, 32 times."""
    return bytes([value]) * 32


def alice_of_vectors(*, raw: bool = False) -> DecentrlIdentity:
    """Alice of reference section 16."""
    keys = {"seed": bytes_of(1), "prekey": bytes_of(2), "storage_key": bytes_of(3)}
    return DecentrlIdentity.of_keys("alice", "did:web:mediator.example", **keys, raw=raw)


# --- identities and commands --------------------------------------------------------------------------------------


def test_did_of_vectors() -> None:
    """Both key encodings give the DIDs of reference section 16."""
    assert alice_of_vectors().did == (
        "did:decentrl:YWxpY2U:z6Mkon3Necd6NkkyfoGoHxid2znGc59LU3K7mubaRcFbLfLX"
        ":z6LSqaU49Tn4sboPj9gbrxmcJ7sHF5gu6bzAASfJnh9meXK6:ZGlkOndlYjptZWRpYXRvci5leGFtcGxl"
    )
    assert alice_of_vectors(raw=True).did == (
        "did:decentrl:YWxpY2U:zAKnL4NNf3DGWZJS6cPknBuEGnVsV4A4m5tgebLHaRSZ9"
        ":zEuHtd9yCn95edmJqLKFeyXeoPw9nPzp1HTwdJEWEw9YL:ZGlkOndlYjptZWRpYXRvci5leGFtcGxl"
    )


def test_signatures_of_vectors() -> None:
    """A command, the first message on a socket and a tag are signed as in reference section 16."""
    alice = alice_of_vectors()
    payload = {"type": "QUERY_EVENTS", "filter": {}, "pagination": {"page": 0, "page_size": 10}}
    mediator = "did:web:mediator.example"
    command = decentrl_client.compose_command(
        alice, decentrl_client.DIRECT_CHANNEL, mediator, payload, timestamp_ms=TIMESTAMP_MS, nonce=NONCE
    )
    assert command["signature"] == (
        "mARV7l20vMxGwMYCyxe3Fpg9a360DNkpSqnEccemwI/M1yVZcPBL1JPFyOv6vYnKb6IhdSu7O2fbft3FcW8vCg=="
    )
    assert decentrl_client.compose_authentication(alice, TIMESTAMP_MS, nonce=NONCE)["signature"] == (
        "PqVGJMu+ZZOZI6IYcL5/uSEGxqjBXBKXEookogoWqxNoykfOGJKR+XK8ZAHTT6fAov2rClZhL71vdtXc9vIxDg=="
    )
    assert alice.tag("chat.abc") == (
        "Jxljs5NjYEigb/GsvqHQqD+QWKzbEIv5Y3PXAgEDldPf8gLiFyxYAHKnB7yYrnZ3+IthHW+7R1WvP5M5zYY0DQ=="
    )


def test_new_identity_resolves_to_its_keys() -> None:
    """A new DID resolves to the keys of its owner, and no others (reference section 2)."""
    alice, another = DecentrlIdentity.generate("alice", MEDIATOR), DecentrlIdentity.generate("alice", MEDIATOR)
    read = parse_did(alice.did)
    assert (read.alias, read.mediator_did) == ("alice", MEDIATOR)
    assert (read.signing_key, read.prekey) == (alice.signing_key, derive_public_key(alice.prekey))
    assert read.signing_key_id == alice.signing_key_id
    assert alice.did != another.did


def test_repr_hides_keys() -> None:
    """The representation of an identity has its DIDs only."""
    shown = repr(alice_of_vectors())
    assert "did:decentrl:" in shown
    assert repr(bytes_of(1)) not in shown and repr(bytes_of(3)) not in shown


def test_storage_encryption() -> None:
    """Data encrypted for storage is restored, and not readable by others (reference 5.1)."""
    alice, bob = DecentrlIdentity.generate("alice", MEDIATOR), DecentrlIdentity.generate("bob", MEDIATOR)
    assert alice.unseal(alice.seal("né")) == "né"
    with pytest.raises(ValueError):
        bob.unseal(alice.seal("né"))


def test_headers_can_be_replaced() -> None:
    """Tests need signed commands with any header."""
    alice = DecentrlIdentity.generate("alice", MEDIATOR)
    command = decentrl_client.compose_command(
        alice, decentrl_client.PRIVATE_CHANNEL, "did:x:1", "sealed", timestamp_ms=1, sender_did="did:x:2", more=1
    )
    assert (command["header"]["sender_did"], command["header"]["more"]) == ("did:x:2", 1)
    signed = {"header": command["header"], "payload": "sealed"}
    assert verify_json(signed, command["signature"], alice.signing_key)


# --- contracts ----------------------------------------------------------------------------------------------------


def keys_of(*identities: DecentrlIdentity) -> Callable[[str, str], bytes | None]:
    """The signing keys of these identities."""
    known = {(item.did, item.signing_key_id): item.signing_key for item in identities}
    return lambda did, key_id: known.get((did, key_id))


class ContractParties:
    """Alice, who proposes a contract, and Bob, its recipient."""

    def __init__(self, **changes: Any) -> None:
        self.alice, self.bob = (
            DecentrlIdentity.generate("alice", MEDIATOR),
            DecentrlIdentity.generate("bob", MEDIATOR),
        )
        self.proposal = propose_contract(self.alice, self.bob.did, NOW, **changes)
        self.request = self.deliver(self.proposal)

    def deliver(self, proposal: ContractProposal) -> ContractRequest:
        """A proposal as Bob's mediator returns it."""
        payload = proposal.payload(parse_did(self.bob.did).prekey)
        return ContractRequest(id="1", sender_did=self.alice.did, **payload)

    def forge(self, **changes: Any) -> ContractRequest:
        """The request with other terms under the same signature."""
        terms = {**self.proposal.request["communication_contract"], **changes}
        return self.deliver(
            replace(self.proposal, request={**self.proposal.request, "communication_contract": terms})
        )

    def accept(self) -> ConcludedContract:
        """Bob's response to it."""
        return accept_contract(self.request, self.bob, NOW)

    def conclude(self, signed: dict[str, Any]) -> ConcludedContract:
        """Alice's contract from that."""
        return conclude_contract(self.proposal, signed, keys_of(self.alice, self.bob))


def test_both_sides_agree() -> None:
    """Both have the same contract id and secret, which is derived from no DID (reference 5.2 and 7)."""
    pair = ContractParties()
    bobs = pair.accept()
    alices = pair.conclude(bobs.signed)
    assert (bobs.peer_did, alices.peer_did) == (pair.alice.did, pair.bob.did)
    assert (alices.id, alices.root_secret) == (bobs.id, bobs.root_secret)
    assert alices.expires_at == NOW + 31_536_000
    prekeys = derive_shared_secret(pair.alice.prekey, parse_did(pair.bob.did).prekey)
    assert alices.root_secret != prekeys


def test_each_contract_has_its_own_secret() -> None:
    """Rotation creates new keys on both sides (reference 7.7)."""
    pair = ContractParties()
    assert pair.accept().root_secret != pair.accept().root_secret
    assert repr(pair.accept().root_secret) not in repr(pair.accept())


def test_only_recipient_can_read_proposal() -> None:
    """A request is encrypted to a key of its recipient's DID (reference 7.6)."""
    pair = ContractParties()
    with pytest.raises(UnreadableMessage, match="does not open"):
        accept_contract(pair.request, DecentrlIdentity.generate("carol", MEDIATOR), NOW)


def test_refused_proposals() -> None:
    """Proposals of another sender, for another recipient, with other terms, or expired."""
    pair, mallory = ContractParties(), DecentrlIdentity.generate("mallory", MEDIATOR)
    for request, why in (
        (pair.request.model_copy(update={"sender_did": mallory.did}), "between others"),
        (pair.request.model_copy(update={"sender_did": "did:x:1"}), "does not open"),
        (pair.forge(recipient_did=mallory.did), "between others"),
        (pair.forge(requestor_signing_key_id=mallory.signing_key_id), "key of somebody else"),
        (pair.forge(expires_at=NOW + 10**9), "not signed"),
        (pair.forge(expires_at="soon"), "does not open"),
    ):
        with pytest.raises(UnreadableMessage, match=why):
            accept_contract(request, pair.bob, NOW)
    with pytest.raises(UnreadableMessage, match="has expired"):
        accept_contract(pair.request, pair.bob, NOW + 31_536_000)


def test_refused_responses() -> None:
    """A contract must be the proposed one, signed by both (reference 7.3)."""
    pair = ContractParties()
    signed = pair.accept().signed
    terms = signed["communication_contract"]
    for answer, why in (
        ({}, "not a contract"),
        ({"communication_contract": []}, "not a contract"),
        ({**signed, "communication_contract": {**terms, "expires_at": NOW}}, "not what was proposed"),
        ({**signed, "recipient_signature": signed["requestor_signature"]}, "not both have signed"),
        (ContractParties().accept().signed, "not what was proposed"),
    ):
        with pytest.raises(UnreadableMessage, match=why):
            pair.conclude(answer)


# --- events between two -------------------------------------------------------------------------------------------


def test_event_round_trip() -> None:
    """The other party reads the event and knows its author (reference section 5)."""
    pair = ContractParties()
    bobs = pair.accept()
    payload = seal_event(pair.alice, pair.conclude(bobs.signed), '{"type":"confidential"}', NOW)
    event = open_event(payload, pair.alice.did, [bobs])
    assert (event.text, event.sender_did, event.timestamp) == ('{"type":"confidential"}', pair.alice.did, NOW)
    assert "confidential" not in payload and "confidential" not in repr(event)


def test_event_is_decrypted_under_its_contract() -> None:
    """Contracts overlap during rotation (reference 7.7)."""
    pair = ContractParties()
    old, new = pair.accept(), pair.accept()
    event = open_event(seal_event(pair.alice, old, "x", NOW), pair.alice.did, [new, old])
    assert event.contract is old


def test_refused_events() -> None:
    """Under an unknown contract, signed by another identity, or malformed."""
    pair, mallory = ContractParties(), DecentrlIdentity.generate("mallory", MEDIATOR)
    agreement = pair.accept()
    envelope = {"contract_id": agreement.id, "event": 1, "timestamp": NOW}
    for payload, why in (
        (seal_event(pair.alice, pair.accept(), "x", NOW), "no contract"),
        (seal_event(mallory, agreement, "x", NOW), "did not sign"),
        (encrypt(b"[]", agreement.root_secret), "not an event"),
        (encrypt(b"{}", agreement.root_secret), "not an event"),
        (
            encrypt(encoding.dumps({**envelope, "signature": pair.alice.sign(envelope)}), agreement.root_secret),
            "not an event",
        ),
    ):
        with pytest.raises(UnreadableMessage, match=why):
            open_event(payload, pair.alice.did, [agreement])


# --- a mediator's document ----------------------------------------------------------------------------------------


def document(*, raw: bool = False, did: str = MEDIATOR, url: str = URL) -> dict[str, Any]:
    """The document of a mediator with the keys of the vectors."""
    signing = DecentrlIdentity.of_keys(
        "m", did, seed=bytes_of(0x11), prekey=bytes_of(0x12), storage_key=b""
    ).signing_key
    return make_mediator_document(did, signing, derive_public_key(bytes_of(0x12)), url, raw=raw)


@pytest.mark.parametrize("raw", [False, True])
def test_mediator_document(raw: bool) -> None:
    """Whatever else is in it: entries of another protocol, and references instead of entries (DCTRL-0004 3.2)."""
    value = document(raw=raw)
    value["keyAgreement"] = [f"{MEDIATOR}#key-1", {"id": f"{MEDIATOR}#key-2"}, *value["keyAgreement"]]
    value["service"] = [{"id": "#didcomm", "serviceEndpoint": "https://elsewhere.example"}, *value["service"]]
    found = read_mediator_document(value)
    assert (found.did, found.url, found.ws_url) == (MEDIATOR, URL, "ws://127.0.0.1:8080/ws")
    assert found.prekey == derive_public_key(bytes_of(0x12))
    assert found.public_url("did:x:1") == f"{URL}/public/did:x:1"


def test_socket_url_with_tls() -> None:
    """https: with a path gives wss: at the same place."""
    assert read_mediator_document(document(url="https://m.example/d/")).ws_url == "wss://m.example/d/ws"


@pytest.mark.parametrize("member", ["id", "service", "verificationMethod", "keyAgreement"])
def test_incomplete_document(member: str) -> None:
    """A wallet needs all of it."""
    values: tuple[Any, ...] = (None, [], [{}], "x")
    for value in values:
        with pytest.raises(UnreadableMessage):
            read_mediator_document({**document(), member: value})
