"""
Wallets at the measured mediator: its discovery, their enrolment, forwards to them, their sockets and their queues.

Wallets block until the mediator has responded. Their messages are packed by :mod:`mediatord.wallet`.
"""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from itertools import cycle, islice
from secrets import token_hex
from time import perf_counter, process_time
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from twisted.internet.task import Clock

from mediatord.bench.raw_clients import KeepAliveClient, WebSocketClient
from mediatord.bench.results import LoadResult, progress_bar
from mediatord.errors import MediatorError
from mediatord.protocol.didcomm.did_document import parse_did_document
from mediatord.protocol.didcomm.jwe import ENCRYPTED_MEDIA_TYPE, EphemeralKey
from mediatord.protocol.didcomm.message import Message
from mediatord.protocol.encoding import dumps, loads_object
from mediatord.wallet.decentrl_client import CommandRefused
from mediatord.wallet.didcomm_client import (
    PICKUP,
    DIDCommMediator,
    DIDCommWallet,
    HTTPResponse,
    MediatorProblem,
    read_attachment,
)
from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.didcomm_messages import (
    BASIC_MESSAGE,
    DIDDocumentCache,
    UnreadableMessage,
    anoncrypt,
    authcrypt,
    build_forward,
    compose_message,
)

_DISCOVERY_TIMEOUT_SECONDS = 30
_MAX_RESPONSE_BYTES = 1 << 20
_DISCOVERY_PATHS = ("/did", "/invitation", "", "/.well-known/did.json")

Result = TypeVar("Result")


def find_mediator(url: str, did: str | None = None) -> DIDCommMediator:
    """
    Find the mediator at a URL by its DID, its invitation or its did:web document (reference 7.4, 8.4).

    :param url: of the mediator, or of its out-of-band invitation.
    :param did: its DID, if known.
    :raise RuntimeError: no DID is published there, or it does not resolve.
    """
    for candidate in [did] if did else _advertised_dids(url):
        with suppress(LookupError, MediatorError, UnreadableMessage, ValueError, OSError):
            if not candidate.startswith("did:web:"):
                return DIDCommMediator.from_did(candidate)
            document = json.loads(fetch(f"{urlsplit(url)._replace(path='', query='').geturl()}/.well-known/did.json"))
            return DIDCommMediator.from_document(parse_did_document(candidate, document))
    raise RuntimeError(f"no DIDComm mediator found at {url}; use --target-did to give its DID")


def _advertised_dids(url: str) -> Iterator[str]:
    """A plain DID, `from` of an invitation or `id` of a DID document."""
    if invitation := parse_qs(urlsplit(url).query).get("_oob"):
        yield json.loads(base64.urlsafe_b64decode(invitation[0] + "=="))["from"]
        return
    for path in _DISCOVERY_PATHS:
        with suppress(OSError, ValueError):
            text = fetch(url.rstrip("/") + path)
            if text.startswith(b"did:"):
                yield text.decode("ascii").strip()
            elif isinstance(did := (value := loads_object(text)).get("from", value.get("id")), str):
                yield did


def fetch(url: str) -> bytes:
    """
    GET a document.

    :raise OSError: there is none.
    """
    request = urllib.request.Request(url, headers={"Accept": "application/json, text/plain"})
    with urllib.request.urlopen(request, timeout=_DISCOVERY_TIMEOUT_SECONDS) as response:
        content: bytes = response.read(_MAX_RESPONSE_BYTES)
        return content


def run_blocking(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """
    The result of a wallet's request that blocks.

    :raise RuntimeError: the mediator refused it.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: Result = end.value
        return result
    except (CommandRefused, MediatorProblem, UnreadableMessage) as error:
        raise RuntimeError(f"the mediator refused a request: {error}") from error
    raise AssertionError("a request that does not block")


class SystemClock(Clock):
    """The clock of wallets outside of a reactor."""

    def seconds(self) -> float:
        """Unix seconds."""
        return datetime.now(UTC).timestamp()


# More than the daemon caches secrets of, so that a key that comes again costs it as much as a new one.
_EPHEMERAL_KEYS = 64


class BlockingWallet(DIDCommWallet):
    """
    A wallet whose requests block, for :func:`run_blocking`.

    :param ephemeral_keys: used in turn, because generating keys takes half of the time of a request.
    :ivar http_headers: of its requests and of the handshake of its sockets, in addition to the usual ones.
    """

    def __init__(
        self,
        identity: WalletIdentity,
        mediator: DIDCommMediator,
        documents: DIDDocumentCache,
        connection: KeepAliveClient | None,
        ephemeral_keys: Iterator[EphemeralKey],
    ) -> None:
        super().__init__(identity, None, SystemClock(), mediator, documents)  # type: ignore[arg-type]
        self.http_headers: dict[str, str] = {}
        self._connection = connection
        self._ephemeral_keys = ephemeral_keys

    def encrypt(self, message: Mapping[str, Any]) -> bytes:
        """An authcrypt for the mediator."""
        return authcrypt(message, self.identity, self.mediator.document, next(self._ephemeral_keys))

    async def post(
        self, body: bytes, *, url: str | None = None, content_type: str | None = ENCRYPTED_MEDIA_TYPE
    ) -> HTTPResponse:
        """POST to the mediator."""
        assert self._connection is not None
        return self._connection.post(body, headers=self.http_headers)


def _generate_ephemeral_key() -> EphemeralKey:
    key = EphemeralKey.generate("X25519")
    return EphemeralKey(key.jwk, lru_cache(maxsize=1)(key.exchange))


@dataclass(frozen=True, slots=True)
class WalletGroup:
    """
    Wallets of one mediator.

    :param hop: whom forwards are encrypted for: the mediator, unless it grants the DID of another.
    :param forward_headers: of forwards to them, in addition to the usual ones.
    """

    mediator: DIDCommMediator
    wallets: tuple[BlockingWallet, ...]
    hop: DIDCommMediator
    connection: KeepAliveClient | None = None
    forward_headers: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def generate(
        cls,
        mediator: DIDCommMediator,
        count: int,
        connection: KeepAliveClient | None = None,
        *,
        short: bool = True,
        kind: type[BlockingWallet] = BlockingWallet,
    ) -> WalletGroup:
        """
        New wallets, which are not enrolled.

        :param short: DIDs without a service, a quarter of the length of those that name the mediator.
        """
        documents, keys = DIDDocumentCache(), cycle([_generate_ephemeral_key() for _ in range(_EPHEMERAL_KEYS)])
        identities = (WalletIdentity.generate(endpoint=None if short else mediator.did) for _ in range(count))
        wallets = tuple(kind(one, mediator, documents, connection, keys) for one in identities)
        return cls(mediator, wallets, mediator, connection)

    def unregister(self) -> None:
        """
        Unregister the wallets' DIDs.

        :raise RuntimeError: the mediator refused.
        """
        for wallet in self.wallets:
            run_blocking(wallet.unregister())

    def forwards(self, size: int, count: int, *, payloads: int = 1) -> Iterator[tuple[bytes, str]]:
        """
        Forwards to the wallets in turn, each with its own keys, and the `tag` of its last inner envelope.

        :param size: of the innermost plaintext, in bytes.
        :param payloads: inner envelopes in each forward.
        """
        for wallet in islice(cycle(self.wallets), count):
            inner = [build_inner_envelope(wallet.identity, size) for _ in range(payloads)]
            forward = build_forward(wallet.did, inner, to=[self.hop.did], **self.forward_headers)
            yield anoncrypt(forward, self.hop.document), loads_object(inner[-1])["tag"]

    def count_queued(self) -> int:
        """Number of messages queued for the wallets, according to the mediator."""
        return sum(run_blocking(wallet.status()).message_count for wallet in self.wallets)

    def drain(self, connections: int = 2, limit: int = 50) -> LoadResult:
        """
        Fetch and acknowledge everything queued for the wallets (Pickup 3.0); accepted are the messages.

        :param limit: messages in one delivery at most.
        """
        start, start_cpu, waiting = perf_counter(), process_time(), iter(self.wallets)
        connection, result = self.connection, LoadResult()
        assert connection is not None

        def work() -> int:
            connection.latencies_us, messages = result.latencies_us, 0
            for wallet in waiting:
                while delivered := run_blocking(wallet.fetch(limit)):
                    messages += len(delivered)
                    if not run_blocking(wallet.acknowledge(delivered)).message_count:
                        break
            return messages

        with ThreadPoolExecutor(connections) as pool:
            for messages in [pool.submit(work) for _ in range(connections)]:
                result.accepted += messages.result()
        result.seconds, result.client_seconds = perf_counter() - start, process_time() - start_cpu
        return result


# A smaller group has no progress bar: it is quick, and another bar may be on display.
_MANY_WALLETS = 500


def enrol_group(mediator: DIDCommMediator | str, count: int, *, short: bool = False) -> WalletGroup:
    """
    Create wallets and enrol them by Coordinate Mediation 3.0, or 2.0 if the mediator does not know 3.0.

    :param mediator: or its URL.
    :param short: as of :meth:`WalletGroup.generate`.
    :raise RuntimeError: the mediator refused.
    """
    if isinstance(mediator, str):
        mediator = find_mediator(mediator)
    group, hop = WalletGroup.generate(mediator, count, KeepAliveClient(mediator.http_uri), short=short), mediator
    enrolling = progress_bar(group.wallets, "wallets") if count >= _MANY_WALLETS else nullcontext(group.wallets)
    with enrolling as wallets:
        for wallet in wallets:
            wallet.coordination_version = group.wallets[0].coordination_version
            try:
                (granted, *_) = run_blocking(wallet.grant())
            except RuntimeError:
                if wallet is not group.wallets[0]:
                    raise
                wallet.coordination_version = "2.0"
                (granted, *_) = run_blocking(wallet.grant())
            if granted != hop.did:
                # It may be an alias of the mediator that does not resolve locally.
                with suppress(LookupError, MediatorError, UnreadableMessage):
                    hop = DIDCommMediator.from_did(granted)
            run_blocking(wallet.register())
    return WalletGroup(mediator, group.wallets, hop, group.connection)


def build_inner_envelope(wallet: WalletIdentity, size: int) -> bytes:
    """An anoncrypt for a wallet whose plaintext has `size` bytes, or the least possible number."""
    message = compose_message(BASIC_MESSAGE, {"content": ""}, to=[wallet.did])
    rest = max(0, size - len(dumps(message)))
    message["body"]["content"] = token_hex(rest)[:rest]
    return anoncrypt(message, wallet.document)


class LiveSocket:
    """
    A wallet's WebSocket to its mediator, for live delivery.

    :param socket: by default a new one.
    """

    def __init__(self, wallet: BlockingWallet, socket: WebSocketClient | None = None) -> None:
        self.wallet = wallet
        self.socket = socket or WebSocketClient(require_socket_url(wallet.mediator), headers=wallet.http_headers)
        self.fileno, self.close = self.socket.fileno, self.socket.close

    def enable_live_delivery(self) -> None:
        """
        Switch live delivery on.

        :raise UnreadableMessage: it was not confirmed.
        """
        if self._ask("live-delivery-change", live_delivery=True).get("live_delivery") is False:
            raise UnreadableMessage("live delivery was not turned on")

    def count_queued(self) -> int:
        """Number of messages queued for the wallet."""
        return int(self._ask("status-request")["message_count"])

    def acknowledge(self, ids: list[str]) -> None:
        """Acknowledge messages without waiting for a response."""
        self.send("messages-received", return_route="none", message_id_list=ids)

    def send(self, name: str, return_route: str = "all", **body: Any) -> str:
        """Send a Pickup request; its id."""
        message, envelope = self.wallet.pack(f"{PICKUP}/{name}", body, return_route=return_route)
        self.socket.send(envelope)
        return str(message["id"])

    def take_deliveries(self, *most: int) -> Iterator[list[tuple[str, str]]]:
        """Read what has arrived: id and envelope's `tag` of each message of each delivery; a status has none."""
        for raw in self.socket.take(*most):
            message = self.wallet.from_mediator(raw).message
            delivered = [read_attachment(one) for one in message.attachments or ()]
            if not delivered and message.type.uri != f"{PICKUP}/status":
                raise UnreadableMessage("neither a delivery nor a status")
            yield [(one.id, loads_object(one.payload)["tag"]) for one in delivered]

    def _ask(self, name: str, **body: Any) -> dict[str, Any]:
        """Body of the `status` that responds to a request. What arrives before is ignored."""
        id_ = self.send(name, **body)
        while True:
            for message in map(self._open, self.socket.take()):
                if message is not None and message.type.uri == f"{PICKUP}/status" and message.thid == id_:
                    return message.body or {}

    def _open(self, raw: bytes) -> Message | None:
        """A message of the mediator itself; None for another."""
        return self.wallet.from_mediator(raw).message


def require_socket_url(mediator: DIDCommMediator) -> str:
    """
    URL of the mediator's WebSocket.

    :raise RuntimeError: it has none.
    """
    if mediator.ws_uri is None:
        raise RuntimeError("the mediator's DID document names no WebSocket")
    return mediator.ws_uri
