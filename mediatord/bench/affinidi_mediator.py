"""
Affinidi's mediator as a target: its discovery, wallets that authenticate to it, and their sockets.

It knows no enrolment. A wallet proves its DID once, gets a token and sends it with every request and with the
handshake of its WebSocket. Forwards are anonymous. What is stored for a live wallet is pushed as it is, not inside of
a `delivery`, and is named by its SHA-256.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from mediatord.bench.raw_clients import KeepAliveClient, encode_request
from mediatord.bench.wallet_group import BlockingWallet, LiveSocket, WalletGroup, fetch, find_mediator, run_blocking
from mediatord.protocol.didcomm.jwe import ENCRYPTED_MEDIA_TYPE, parse_envelope
from mediatord.protocol.didcomm.message import Message
from mediatord.protocol.encoding import dumps, loads_object
from mediatord.wallet.didcomm_client import DIDCommMediator, HTTPResponse, MediatorProblem

_AUTHENTICATE = "https://affinidi.com/atm/1.0/authenticate"
_JSON = "application/json"
_AUTHENTICATION_SECONDS = 60
# Messages that nobody fetches are gone after this time.
_FORWARD_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class AffinidiMediator(DIDCommMediator):
    """
    One of Affinidi's mediators.

    :param url: of its API, without a slash at the end.
    """

    url: str


def find_affinidi_mediator(url: str, did: str | None = None) -> AffinidiMediator | None:
    """
    The mediator at a URL, if it publishes its DID as Affinidi's does.

    :param url: of its API, for example `http://127.0.0.1:7037/mediator/v1`.
    :param did: its DID, if known.
    :raise RuntimeError: the DID does not resolve.
    """
    url = url.rstrip("/")
    with suppress(OSError, ValueError):
        published = loads_object(fetch(f"{url}/.well-known/did")).get("data")
        if isinstance(published, str) and published.startswith("did:"):
            found = find_mediator(url, did or published)
            socket_url = f"{url.replace('http', 'ws', 1)}/ws"
            return AffinidiMediator(found.did, found.document, f"{url}/inbound", socket_url, url)
    return None


class AffinidiWallet(BlockingWallet):
    """A wallet of Affinidi's mediator, whose responses are JSON; the API's error is a :class:`MediatorProblem`."""

    async def authenticate(self) -> None:
        """Prove the DID, and keep the token for requests and sockets."""
        challenge = self._exchange("authenticate/challenge", dumps({"did": self.did}))
        body = {name: challenge[name] for name in ("challenge", "session_id")}
        expires = int(self.clock.seconds()) + _AUTHENTICATION_SECONDS
        _, envelope = self.pack(_AUTHENTICATE, body, expires_time=expires, return_route=None)
        token = self._exchange("authenticate", envelope)["access_token"]
        self.http_headers = {"Authorization": f"Bearer {token}"}

    async def post(
        self, body: bytes, *, url: str | None = None, content_type: str | None = ENCRYPTED_MEDIA_TYPE
    ) -> HTTPResponse:
        """POST to the mediator; the message in its response."""
        packed = self._exchange("inbound", body)["Ephemeral"]
        return HTTPResponse(200, {"content-type": ENCRYPTED_MEDIA_TYPE}, packed.encode("ascii"))

    def _exchange(self, path: str, body: bytes) -> dict[str, Any]:
        assert self._connection is not None and isinstance(self.mediator, AffinidiMediator)
        request = encode_request(f"{self.mediator.url}/{path}", body, _JSON, headers=self.http_headers)
        response = self._connection.exchange(request)
        try:
            value = loads_object(response.body)
        except ValueError:
            value = {}
        data = value.get("data")
        if response.status != 200 or not isinstance(data, dict):
            report = {"body": {"code": value.get("errorCodeStr", ""), "comment": value.get("message", "")}}
            raise MediatorProblem(response.status, report)
        return data


def enrol_affinidi_group(mediator: AffinidiMediator, count: int, *, short: bool = False) -> WalletGroup:
    """
    Create wallets and authenticate them.

    :param short: as of :meth:`WalletGroup.generate`.
    :raise RuntimeError: the mediator refused.
    """
    connection = KeepAliveClient(mediator.http_uri)
    group = WalletGroup.generate(mediator, count, connection, short=short, kind=AffinidiWallet)
    for wallet in group.wallets:
        assert isinstance(wallet, AffinidiWallet)
        run_blocking(wallet.authenticate())
    expires = int(group.wallets[0].clock.seconds()) + _FORWARD_SECONDS
    return WalletGroup(mediator, group.wallets, mediator, connection, {"expires_time": expires})


class AffinidiLiveSocket(LiveSocket):
    """A wallet's WebSocket to Affinidi's mediator, which answers acknowledgements, too."""

    def acknowledge(self, ids: list[str]) -> None:
        """Acknowledge messages without waiting for the response."""
        self.send("messages-received", message_id_list=ids)

    def take_deliveries(self, *most: int) -> Iterator[list[tuple[str, str]]]:
        """Read what has arrived, as of :class:`LiveSocket`."""
        for raw in self.socket.take(*most):
            if _is_pushed(raw):
                yield [(sha256(raw).hexdigest(), loads_object(raw)["tag"])]

    def _open(self, raw: bytes) -> Message | None:
        return None if _is_pushed(raw) else super()._open(raw)


def _is_pushed(raw: bytes) -> bool:
    """Whether it is a stored message, which is anonymous here; the mediator authenticates its own."""
    return parse_envelope(raw).sender_kid is None
