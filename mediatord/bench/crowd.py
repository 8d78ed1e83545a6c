"""Wallets that the daemon knows, and prepared forwards to them."""

from __future__ import annotations

import http.client
import secrets
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any
from urllib.parse import urlsplit

from mediatord.protocol import jsontext
from mediatord.protocol.didcomm.message import ENCRYPTED_TYPE, Message
from mediatord.wallet.identity import Identity
from mediatord.wallet.mediator import Mediator
from mediatord.wallet.packing import BASIC_MESSAGE, AddressBook, anoncrypt, authcrypt, compose, forward, unpack

_COORDINATION = "https://didcomm.org/coordinate-mediation/3.0"
_TIMEOUT_SECONDS = 30


@dataclass(frozen=True, slots=True)
class Crowd:
    """
    :param wallets: enrolled, each registered under its own DID.
    """

    mediator: Mediator
    wallets: tuple[Identity, ...]


def mediator_at(url: str) -> Mediator:
    """The mediator that a daemon says it is."""
    with urllib.request.urlopen(f"{url}/did", timeout=_TIMEOUT_SECONDS) as response:
        return Mediator.from_did(response.read().decode("ascii").strip())


def request_of(wallet: Identity, mediator: Mediator, type_: str, body: Mapping[str, Any]) -> bytes:
    """A packed request of a wallet."""
    headers = {"from": wallet.did, "to": [mediator.did], "return_route": "all"}
    return authcrypt(compose(type_, body, **headers), wallet, mediator.document)


def gather(url: str, count: int) -> Crowd:
    """
    Make wallets and enrol them.

    :raise RuntimeError: the daemon did not do as asked.
    """
    mediator = mediator_at(url)
    wallets = tuple(Identity.fresh(endpoint=mediator.did) for _ in range(count))
    target = urlsplit(mediator.http_uri)
    connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=_TIMEOUT_SECONDS)
    try:
        for wallet in wallets:
            _enrol(connection, target.path, wallet, mediator)
    finally:
        connection.close()
    return Crowd(mediator, wallets)


def _enrol(connection: http.client.HTTPConnection, path: str, wallet: Identity, mediator: Mediator) -> None:
    updates = [{"recipient_did": wallet.did, "action": "add"}]
    for name, body, answer in (
        ("mediate-request", {}, "mediate-grant"),
        ("recipient-update", {"updates": updates}, "recipient-update-response"),
    ):
        packed = request_of(wallet, mediator, f"{_COORDINATION}/{name}", body)
        connection.request("POST", path, packed, {"Content-Type": ENCRYPTED_TYPE})
        response = connection.getresponse()
        message = read_answer(response.read(), wallet)
        if response.status != 200 or message.type.uri != f"{_COORDINATION}/{answer}":
            raise RuntimeError(f"the daemon answered {response.status} to {name}")


def read_answer(raw: bytes, wallet: Identity) -> Message:
    """A packed answer of the mediator."""
    return unpack(raw, wallet, AddressBook().resolve).message


def forwards(crowd: Crowd, size: int, count: int, *, payloads: int = 1) -> list[bytes]:
    """
    Envelopes as they are POSTed, to the wallets in turn, each with keys of its own.

    :param size: of the plaintext in an inner envelope, in bytes.
    :param payloads: inner envelopes in each forward.
    """
    mediator = crowd.mediator
    packed = []
    for wallet in islice(cycle(crowd.wallets), count):
        letters = [inner_envelope(wallet, size) for _ in range(payloads)]
        packed.append(anoncrypt(forward(wallet.did, letters, to=[mediator.did]), mediator.document))
    return packed


def inner_envelope(wallet: Identity, size: int) -> bytes:
    """What is stored: a message to a wallet whose plaintext has this many bytes, or as few as one can have."""
    message = compose(BASIC_MESSAGE, {"content": ""}, to=[wallet.did])
    rest = max(0, size - len(jsontext.dumps(message)))
    message["body"]["content"] = secrets.token_hex(rest)[:rest]
    return anoncrypt(message, wallet.document)
