"""What the load generator's wallets say: ordinary messages, packed with less work."""

from __future__ import annotations

import json

import pytest

from mediatord.bench.courier import PICKUP, Courier, ids_and_tags
from mediatord.bench.crowd import Crowd, letters
from mediatord.protocol.didcomm.keys import PrivateKey, PublicKey
from mediatord.protocol.jsontext import b64url_encode
from mediatord.wallet.identity import Identity
from mediatord.wallet.mediator import Mediator
from mediatord.wallet.packing import AddressBook, Unreadable, authcrypt, compose, unpack


@pytest.fixture(name="house")
def a_house() -> tuple[Identity, Courier]:
    """A mediator's identity, and the courier of a wallet of it."""
    mediator = Identity.fresh(endpoint="http://127.0.0.1:1/didcomm")
    return mediator, Courier(Identity.fresh(), Mediator.of(mediator.document))


def answer_to(courier: Courier, mediator: Identity) -> bytes:
    """What a mediator says."""
    headers = {"from": mediator.did, "to": [courier.wallet.did]}
    return authcrypt(compose(f"{PICKUP}/status", {"message_count": 3}, **headers), mediator, courier.wallet.document)


def test_requests_are_ordinary_authcrypts(house: tuple[Identity, Courier]) -> None:
    """A mediator opens them, is sure of the sender, and finds what was asked for."""
    mediator, courier = house
    opened = unpack(courier.acknowledgement(["one", "two"]), mediator, AddressBook().resolve)
    assert opened.sender == courier.wallet.did
    assert opened.message.type.uri == f"{PICKUP}/messages-received"
    assert opened.body == {"message_id_list": ["one", "two"]}
    assert opened.message.return_route == "none"


def test_key_agreements_are_not_repeated(house: tuple[Identity, Courier], monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing takes none, reading an answer takes one: what measures must cost less than what is measured."""
    mediator, courier = house
    answers = [answer_to(courier, mediator) for _ in range(5)]
    agreements = 0
    exchange = PrivateKey.exchange

    def counted(key: PrivateKey, other: PublicKey) -> bytes:
        nonlocal agreements
        agreements += 1
        return exchange(key, other)

    monkeypatch.setattr(PrivateKey, "exchange", counted)
    requests = {courier.request(f"{PICKUP}/status-request", {}) for _ in range(5)}
    assert (len(requests), agreements) == (5, 0)
    assert [courier.open(answer)["body"] for answer in answers] == [{"message_count": 3}] * 5
    assert agreements == 5


def test_answers_of_others_are_not_taken(house: tuple[Identity, Courier]) -> None:
    """Neither what somebody else has encrypted, nor what has been changed on the way."""
    mediator, courier = house
    with pytest.raises(Unreadable):
        courier.open(answer_to(courier, mediator).replace(b'"tag":"', b'"tag":"AAAA'))
    envelope = json.loads(answer_to(courier, mediator))
    envelope["ciphertext"] = b64url_encode(bytes(64))
    with pytest.raises(Unreadable):
        courier.open(json.dumps(envelope).encode())


def test_deliveries_name_their_messages() -> None:
    """A message is known by the tag of its envelope, attached in either form."""
    crowd = Crowd(Mediator.of(Identity.fresh(endpoint="http://127.0.0.1:1/").document), (Identity.fresh(),))
    ((_, tag),) = letters(crowd, 300, 1)
    plain = {"id": "a", "data": {"json": {"tag": tag}}}
    encoded = {"id": "b", "data": {"base64": b64url_encode(json.dumps({"tag": "x"}).encode())}}
    assert ids_and_tags({"attachments": [plain, encoded]}) == [("a", tag), ("b", "x")]
    with pytest.raises(Unreadable):
        ids_and_tags({"attachments": [{"id": "a", "data": {"links": []}}]})
