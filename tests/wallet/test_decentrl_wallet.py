"""The Decentrl wallet of demo, tests and benchmark: what it makes, and what it accepts from others."""

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


def alice_of_the_vectors(*, raw: bool = False) -> DecentrlIdentity:
    """The one of reference section 16."""
    keys = {"seed": bytes_of(1), "prekey": bytes_of(2), "storage_key": bytes_of(3)}
    return DecentrlIdentity.of_keys("alice", "did:web:mediator.example", **keys, raw=raw)


# --- identities and commands --------------------------------------------------------------------------------------


def test_did_of_the_vectors() -> None:
    """Both ways to write keys make the DIDs of reference section 16."""
    assert alice_of_the_vectors().did == (
        "did:decentrl:YWxpY2U:z6Mkon3Necd6NkkyfoGoHxid2znGc59LU3K7mubaRcFbLfLX"
        ":z6LSqaU49Tn4sboPj9gbrxmcJ7sHF5gu6bzAASfJnh9meXK6:ZGlkOndlYjptZWRpYXRvci5leGFtcGxl"
    )
    assert alice_of_the_vectors(raw=True).did == (
        "did:decentrl:YWxpY2U:zAKnL4NNf3DGWZJS6cPknBuEGnVsV4A4m5tgebLHaRSZ9"
        ":zEuHtd9yCn95edmJqLKFeyXeoPw9nPzp1HTwdJEWEw9YL:ZGlkOndlYjptZWRpYXRvci5leGFtcGxl"
    )


def test_signatures_of_the_vectors() -> None:
    """A command, the first message on a socket and a tag are signed as in reference section 16."""
    alice = alice_of_the_vectors()
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


def test_fresh_identity_resolves_to_its_own_keys() -> None:
    """What others read in a fresh DID are the keys that its owner holds, and nobody else's (reference section 2)."""
    alice, another = DecentrlIdentity.generate("alice", MEDIATOR), DecentrlIdentity.generate("alice", MEDIATOR)
    read = parse_did(alice.did)
    assert (read.alias, read.mediator_did) == ("alice", MEDIATOR)
    assert (read.signing_key, read.prekey) == (alice.signing_key, derive_public_key(alice.prekey))
    assert read.signing_key_id == alice.signing_key_id
    assert alice.did != another.did


def test_keys_stay_out_of_sight() -> None:
    """Who prints an identity prints its DIDs."""
    shown = repr(alice_of_the_vectors())
    assert "did:decentrl:" in shown
    assert repr(bytes_of(1)) not in shown and repr(bytes_of(3)) not in shown


def test_storage_is_for_oneself() -> None:
    """What is encrypted for storage comes out as it went in, for nobody else (reference 5.1)."""
    alice, bob = DecentrlIdentity.generate("alice", MEDIATOR), DecentrlIdentity.generate("bob", MEDIATOR)
    assert alice.unseal(alice.seal("né")) == "né"
    with pytest.raises(ValueError):
        bob.unseal(alice.seal("né"))


def test_headers_can_be_replaced() -> None:
    """Tests need commands with any header, and signed all the same."""
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
    known = {(one.did, one.signing_key_id): one.signing_key for one in identities}
    return lambda did, key_id: known.get((did, key_id))


class Pair:
    """Alice, who proposes a contract, and Bob, who is asked for it."""

    def __init__(self, **changes: Any) -> None:
        self.alice, self.bob = (
            DecentrlIdentity.generate("alice", MEDIATOR),
            DecentrlIdentity.generate("bob", MEDIATOR),
        )
        self.proposal = propose_contract(self.alice, self.bob.did, NOW, **changes)
        self.request = self.sent(self.proposal)

    def sent(self, proposal: ContractProposal) -> ContractRequest:
        """A proposal as Bob's mediator hands it out."""
        payload = proposal.payload(parse_did(self.bob.did).prekey)
        return ContractRequest(id="1", sender_did=self.alice.did, **payload)

    def changed(self, **changes: Any) -> ContractRequest:
        """The request with other terms under the same signature."""
        terms = {**self.proposal.request["communication_contract"], **changes}
        return self.sent(replace(self.proposal, request={**self.proposal.request, "communication_contract": terms}))

    def accepted(self) -> ConcludedContract:
        """What Bob makes of it."""
        return accept_contract(self.request, self.bob, NOW)

    def concluded(self, signed: dict[str, Any]) -> ConcludedContract:
        """What Alice makes of that."""
        return conclude_contract(self.proposal, signed, keys_of(self.alice, self.bob))


def test_contract_gives_both_the_same() -> None:
    """Both know it by the same id and have the same secret, which is that of no DID (reference 5.2 and 7)."""
    pair = Pair()
    bobs = pair.accepted()
    alices = pair.concluded(bobs.signed)
    assert (bobs.peer_did, alices.peer_did) == (pair.alice.did, pair.bob.did)
    assert (alices.id, alices.root_secret) == (bobs.id, bobs.root_secret)
    assert alices.expires_at == NOW + 31_536_000
    prekeys = derive_shared_secret(pair.alice.prekey, parse_did(pair.bob.did).prekey)
    assert alices.root_secret != prekeys


def test_every_contract_has_its_own_secret() -> None:
    """Rotation makes new keys on both sides (reference 7.7)."""
    pair = Pair()
    assert pair.accepted().root_secret != pair.accepted().root_secret
    assert repr(pair.accepted().root_secret) not in repr(pair.accepted())


def test_only_the_one_who_is_asked_can_read_a_proposal() -> None:
    """A request is encrypted to a key of its recipient's DID (reference 7.6)."""
    pair = Pair()
    with pytest.raises(UnreadableMessage, match="does not open"):
        accept_contract(pair.request, DecentrlIdentity.generate("carol", MEDIATOR), NOW)


def test_proposals_that_are_not_accepted() -> None:
    """Not what is proposed by one and sent by another, for somebody else, under other terms, or too late."""
    pair, mallory = Pair(), DecentrlIdentity.generate("mallory", MEDIATOR)
    for request, why in (
        (pair.request.model_copy(update={"sender_did": mallory.did}), "between others"),
        (pair.request.model_copy(update={"sender_did": "did:x:1"}), "does not open"),
        (pair.changed(recipient_did=mallory.did), "between others"),
        (pair.changed(requestor_signing_key_id=mallory.signing_key_id), "key of somebody else"),
        (pair.changed(expires_at=NOW + 10**9), "not signed"),
        (pair.changed(expires_at="soon"), "does not open"),
    ):
        with pytest.raises(UnreadableMessage, match=why):
            accept_contract(request, pair.bob, NOW)
    with pytest.raises(UnreadableMessage, match="has expired"):
        accept_contract(pair.request, pair.bob, NOW + 31_536_000)


def test_answers_that_are_not_believed() -> None:
    """A contract has to be what was proposed, signed by both (reference 7.3)."""
    pair = Pair()
    signed = pair.accepted().signed
    terms = signed["communication_contract"]
    for answer, why in (
        ({}, "not a contract"),
        ({"communication_contract": []}, "not a contract"),
        ({**signed, "communication_contract": {**terms, "expires_at": NOW}}, "not what was proposed"),
        ({**signed, "recipient_signature": signed["requestor_signature"]}, "not both have signed"),
        (Pair().accepted().signed, "not what was proposed"),
    ):
        with pytest.raises(UnreadableMessage, match=why):
            pair.concluded(answer)


# --- events between two -------------------------------------------------------------------------------------------


def test_event_comes_out_as_it_went_in() -> None:
    """The other side of the contract reads the event and knows who wrote it (reference section 5)."""
    pair = Pair()
    bobs = pair.accepted()
    payload = seal_event(pair.alice, pair.concluded(bobs.signed), '{"type":"confidential"}', NOW)
    event = open_event(payload, pair.alice.did, [bobs])
    assert (event.text, event.sender_did, event.timestamp) == ('{"type":"confidential"}', pair.alice.did, NOW)
    assert "confidential" not in payload and "confidential" not in repr(event)


def test_event_is_opened_under_whichever_contract_it_was_sent() -> None:
    """Contracts overlap while they are rotated (reference 7.7)."""
    pair = Pair()
    old, new = pair.accepted(), pair.accepted()
    event = open_event(seal_event(pair.alice, old, "x", NOW), pair.alice.did, [new, old])
    assert event.contract is old


def test_events_that_are_not_read() -> None:
    """Under no contract of ours, signed by somebody else, or no event at all."""
    pair, mallory = Pair(), DecentrlIdentity.generate("mallory", MEDIATOR)
    agreement = pair.accepted()
    envelope = {"contract_id": agreement.id, "event": 1, "timestamp": NOW}
    for payload, why in (
        (seal_event(pair.alice, pair.accepted(), "x", NOW), "no contract"),
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
    """That of a mediator with the keys of the vectors."""
    signing = DecentrlIdentity.of_keys(
        "m", did, seed=bytes_of(0x11), prekey=bytes_of(0x12), storage_key=b""
    ).signing_key
    return make_mediator_document(did, signing, derive_public_key(bytes_of(0x12)), url, raw=raw)


@pytest.mark.parametrize("raw", [False, True])
def test_document_says_all_that_a_wallet_needs(raw: bool) -> None:
    """Whatever else is in it: entries of another protocol, and references instead of entries (DCTRL-0004 3.2)."""
    value = document(raw=raw)
    value["keyAgreement"] = [f"{MEDIATOR}#key-1", {"id": f"{MEDIATOR}#key-2"}, *value["keyAgreement"]]
    value["service"] = [{"id": "#didcomm", "serviceEndpoint": "https://elsewhere.example"}, *value["service"]]
    found = read_mediator_document(value)
    assert (found.did, found.url, found.ws_url) == (MEDIATOR, URL, "ws://127.0.0.1:8080/ws")
    assert found.prekey == derive_public_key(bytes_of(0x12))
    assert found.public_url("did:x:1") == f"{URL}/public/did:x:1"


def test_socket_of_a_mediator_with_tls() -> None:
    """Behind https: and below a path there is a wss: at the same place."""
    assert read_mediator_document(document(url="https://m.example/d/")).ws_url == "wss://m.example/d/ws"


@pytest.mark.parametrize("member", ["id", "service", "verificationMethod", "keyAgreement"])
def test_document_without_something_is_not_used(member: str) -> None:
    """A wallet needs all of it."""
    values: tuple[Any, ...] = (None, [], [{}], "x")
    for value in values:
        with pytest.raises(UnreadableMessage):
            read_mediator_document({**document(), member: value})
