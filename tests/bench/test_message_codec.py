"""What the load generator's wallets say: ordinary messages, packed with less work."""

from __future__ import annotations

import json

import pytest

from mediatord.bench.didcomm_wallets import FastMessageCodec, WalletGroup, build_tagged_forwards, read_delivery_ids
from mediatord.protocol.didcomm.keys import PrivateKey, PublicKey
from mediatord.protocol.encoding import encode_base64url
from mediatord.wallet.didcomm_client import DIDCommMediator
from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.didcomm_mediation import PICKUP
from mediatord.wallet.didcomm_messages import (
    DIDDocumentCache,
    UnreadableMessage,
    authcrypt,
    compose_message,
    unpack_message,
)


@pytest.fixture(name="in_memory")
def a_house() -> tuple[WalletIdentity, FastMessageCodec]:
    """A mediator's identity, and the courier of a wallet of it."""
    mediator = WalletIdentity.generate(endpoint="http://127.0.0.1:1/didcomm")
    return mediator, FastMessageCodec(WalletIdentity.generate(), DIDCommMediator.from_document(mediator.document))


def answer_to(codec: FastMessageCodec, mediator: WalletIdentity) -> bytes:
    """What a mediator says."""
    headers = {"from": mediator.did, "to": [codec.wallet.did]}
    return authcrypt(
        compose_message(f"{PICKUP}/status", {"message_count": 3}, **headers), mediator, codec.wallet.document
    )


def test_requests_are_ordinary_authcrypts(in_memory: tuple[WalletIdentity, FastMessageCodec]) -> None:
    """A mediator opens them, is sure of the sender, and finds what was asked for."""
    mediator, codec = in_memory
    opened = unpack_message(codec.acknowledgement(["one", "two"]), mediator, DIDDocumentCache().resolve)
    assert opened.sender == codec.wallet.did
    assert opened.message.type.uri == f"{PICKUP}/messages-received"
    assert opened.body == {"message_id_list": ["one", "two"]}
    assert opened.message.return_route == "none"


def test_key_agreements_are_not_repeated(
    in_memory: tuple[WalletIdentity, FastMessageCodec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packing takes none, reading an answer takes one: what measures must cost less than what is measured."""
    mediator, codec = in_memory
    answers = [answer_to(codec, mediator) for _ in range(5)]
    agreements = 0
    exchange = PrivateKey.exchange

    def counted(key: PrivateKey, other: PublicKey) -> bytes:
        nonlocal agreements
        agreements += 1
        return exchange(key, other)

    monkeypatch.setattr(PrivateKey, "exchange", counted)
    requests = {codec.request(f"{PICKUP}/status-request", {}) for _ in range(5)}
    assert (len(requests), agreements) == (5, 0)
    assert [codec.open(answer)["body"] for answer in answers] == [{"message_count": 3}] * 5
    assert agreements == 5


def test_answers_of_others_are_not_taken(in_memory: tuple[WalletIdentity, FastMessageCodec]) -> None:
    """Neither what somebody else has encrypted, nor what has been changed on the way."""
    mediator, codec = in_memory
    with pytest.raises(UnreadableMessage):
        codec.open(answer_to(codec, mediator).replace(b'"tag":"', b'"tag":"AAAA'))
    envelope = json.loads(answer_to(codec, mediator))
    envelope["ciphertext"] = encode_base64url(bytes(64))
    with pytest.raises(UnreadableMessage):
        codec.open(json.dumps(envelope).encode())


def test_deliveries_name_their_messages() -> None:
    """A message is known by the tag of its envelope, attached in either form."""
    mediator = WalletIdentity.generate(endpoint="http://127.0.0.1:1/")
    group = WalletGroup(DIDCommMediator.from_document(mediator.document), (WalletIdentity.generate(),))
    ((_, tag),) = build_tagged_forwards(group, 300, 1)
    plain = {"id": "a", "data": {"json": {"tag": tag}}}
    encoded = {"id": "b", "data": {"base64": encode_base64url(json.dumps({"tag": "x"}).encode())}}
    assert read_delivery_ids({"attachments": [plain, encoded]}) == [("a", tag), ("b", "x")]
    with pytest.raises(UnreadableMessage):
        read_delivery_ids({"attachments": [{"id": "a", "data": {"links": []}}]})
