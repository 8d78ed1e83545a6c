"""Wallets that the daemon knows, and prepared forwards to them."""

from __future__ import annotations

import http.client
import secrets
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any
from urllib.parse import urlsplit

from mediatord.errors import MediatorError
from mediatord.protocol import jsontext
from mediatord.protocol.didcomm.message import ENCRYPTED_TYPE, Message
from mediatord.wallet.identity import Identity
from mediatord.wallet.mediator import Mediator
from mediatord.wallet.packing import (
    BASIC_MESSAGE,
    AddressBook,
    Unreadable,
    anoncrypt,
    authcrypt,
    compose,
    forward,
    unpack,
)

_COORDINATION = "https://didcomm.org/coordinate-mediation"
# The newest first, and what it calls an update of the list.
_VERSIONS = {"3.0": "recipient-update", "2.0": "keylist-update"}
_TIMEOUT_SECONDS = 30


@dataclass(frozen=True, slots=True)
class Crowd:
    """
    :param wallets: enrolled, each registered under its own DID.
    :param routing: whom forwards are encrypted for, if the mediator grants another DID than its own.
    """

    mediator: Mediator
    wallets: tuple[Identity, ...]
    routing: Mediator | None = None

    @property
    def hop(self) -> Mediator:
        """Whom forwards are encrypted for."""
        return self.routing or self.mediator


def mediator_at(url: str) -> Mediator:
    """The mediator that a daemon says it is."""
    with urllib.request.urlopen(f"{url}/did", timeout=_TIMEOUT_SECONDS) as response:
        return Mediator.from_did(response.read().decode("ascii").strip())


def request_of(wallet: Identity, mediator: Mediator, type_: str, body: Mapping[str, Any]) -> bytes:
    """A packed request of a wallet."""
    headers = {"from": wallet.did, "to": [mediator.did], "return_route": "all"}
    return authcrypt(compose(type_, body, **headers), wallet, mediator.document)


def gather(url: str, count: int, *, short: bool = False) -> Crowd:
    """
    Make wallets and enrol them.

    :param short: their DIDs name no service, a quarter of the length of those that name the mediator as theirs.
    :raise RuntimeError: the daemon did not do as asked.
    """
    return gather_at(mediator_at(url), count, short=short)


def gather_at(mediator: Mediator, count: int, *, short: bool = False) -> Crowd:
    """
    The same at a mediator of any make, by Coordinate Mediation 3.0, or by 2.0 if it knows no 3.0.

    :raise RuntimeError: it did not do as asked.
    """
    wallets = tuple(Identity.fresh(endpoint=None if short else mediator.did) for _ in range(count))
    with closing(_Enrolling(mediator)) as enrolling:
        granted = {enrolling.enrol(wallet) for wallet in wallets} - {mediator.did}
    return Crowd(mediator, wallets, _routing(granted))


def dismiss(crowd: Crowd) -> None:
    """
    Take the wallets' DIDs off the mediator's list again.

    :raise RuntimeError: it did not do as asked.
    """
    with closing(_Enrolling(crowd.mediator)) as enrolling:
        for wallet in crowd.wallets:
            enrolling.update(wallet, "remove")


def _routing(granted: set[str]) -> Mediator | None:
    try:
        return Mediator.from_did(granted.pop()) if granted else None
    except (LookupError, MediatorError, Unreadable):
        return None  # what it grants is a name of itself that needs a network


class _Enrolling:
    """One connection on which wallets ask for mediation, in the newest version that is understood."""

    def __init__(self, mediator: Mediator) -> None:
        target = urlsplit(mediator.http_uri)
        self._mediator = mediator
        self._path = target.path or "/"
        self._connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=_TIMEOUT_SECONDS)
        self._versions = list(_VERSIONS)
        self._book = AddressBook()
        self._book.learn(mediator.document)

    def close(self) -> None:
        """The connection."""
        self._connection.close()

    def enrol(self, wallet: Identity) -> str:
        """The routing DID that is granted."""
        while True:
            try:
                body = self._ask(wallet, "mediate-request", {}, "mediate-grant")
                break
            except RuntimeError:
                if len(self._versions) == 1:
                    raise
                self._versions.pop(0)
        self.update(wallet, "add")
        # 2.0 has a string, 3.0 a list.
        dids = body.get("routing_did")
        return str(dids[0] if isinstance(dids, list) and dids else dids or self._mediator.did)

    def update(self, wallet: Identity, action: str) -> None:
        """Put the wallet's DID on the list, or take it off."""
        names = _VERSIONS[self._versions[0]]
        self._ask(wallet, names, {"updates": [{"recipient_did": wallet.did, "action": action}]}, f"{names}-response")

    def _ask(self, wallet: Identity, name: str, body: Mapping[str, Any], answer: str) -> dict[str, Any]:
        protocol = f"{_COORDINATION}/{self._versions[0]}"
        packed = request_of(wallet, self._mediator, f"{protocol}/{name}", body)
        self._connection.request("POST", self._path, packed, {"Content-Type": ENCRYPTED_TYPE})
        response = self._connection.getresponse()
        raw = response.read()
        try:
            message = unpack(raw, wallet, self._book.resolve).message
        except Unreadable:
            raise RuntimeError(f"the mediator answered {response.status} to {name}") from None
        if response.status != 200 or message.type.uri != f"{protocol}/{answer}":
            raise RuntimeError(f"the mediator answered {response.status} to {name}")
        return message.body or {}


def read_answer(raw: bytes, wallet: Identity) -> Message:
    """A packed answer of the mediator."""
    return unpack(raw, wallet, AddressBook().resolve).message


def forwards(crowd: Crowd, size: int, count: int, *, payloads: int = 1) -> list[bytes]:
    """
    Envelopes as they are POSTed, to the wallets in turn, each with keys of its own.

    :param size: of the plaintext in an inner envelope, in bytes.
    :param payloads: inner envelopes in each forward.
    """
    mediator = crowd.hop
    packed = []
    for wallet in islice(cycle(crowd.wallets), count):
        letters = [inner_envelope(wallet, size) for _ in range(payloads)]
        packed.append(anoncrypt(forward(wallet.did, letters, to=[mediator.did]), mediator.document))
    return packed


def letters(crowd: Crowd, size: int, count: int) -> Iterator[tuple[bytes, str]]:
    """
    Forwards of one envelope each, and the `tag` of that envelope, by which it is known when it comes out again.

    :param size: as for :func:`forwards`.
    """
    mediator = crowd.hop
    for wallet in islice(cycle(crowd.wallets), count):
        inner = inner_envelope(wallet, size)
        packed = anoncrypt(forward(wallet.did, [inner], to=[mediator.did]), mediator.document)
        yield packed, jsontext.loads_object(inner)["tag"]


def inner_envelope(wallet: Identity, size: int) -> bytes:
    """What is stored: a message to a wallet whose plaintext has this many bytes, or as few as one can have."""
    message = compose(BASIC_MESSAGE, {"content": ""}, to=[wallet.did])
    rest = max(0, size - len(jsontext.dumps(message)))
    message["body"]["content"] = secrets.token_hex(rest)[:rest]
    return anoncrypt(message, wallet.document)
