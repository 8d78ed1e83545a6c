"""
DIDComm v1 wallets at a measured mediator: their connections, forwards to them, and their sockets.

What is sent under load costs no key agreement: each header of an envelope is used for many messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from secrets import token_bytes, token_hex
from typing import Any

from nacl import bindings

from mediatord.bench.raw_clients import KeepAliveClient, WebSocketClient, encode_request
from mediatord.bench.wallet_group import SystemClock, fetch, run_blocking
from mediatord.protocol import encoding
from mediatord.protocol.didcomm_v1.envelope import RandomSource, pack_anoncrypt, pack_authcrypt
from mediatord.protocol.didcomm_v1.keys import SigningKey, derive_agreement_key, parse_key
from mediatord.protocol.didcomm_v1.message import V1Message, parse_message
from mediatord.wallet.didcomm_client import HTTPResponse
from mediatord.wallet.didcomm_messages import UnreadableMessage
from mediatord.wallet.didcomm_v1_client import (
    BASIC_MESSAGE,
    PICKUP_2,
    V1Wallet,
    read_v1_delivery,
    read_v1_status,
)
from mediatord.wallet.didcomm_v1_messages import (
    V1Invitation,
    build_v1_forward,
    compose_v1_message,
)

# More than a mediator may cache anything of.
_HEADERS = 64
_IV_SIZE, _TAG_SIZE, _CEK_SIZE = 12, 16, 32
_PLACE_OF_TAG = "0" * 22


class EnvelopeHeader:
    """
    The protected header of an envelope, for messages that differ in their content only.

    :param pack: packs a plaintext, with a source of random bytes.
    """

    def __init__(self, pack: Callable[..., bytes]) -> None:
        self._cek = token_bytes(_CEK_SIZE)
        random: RandomSource = lambda size: self._cek if size == _CEK_SIZE else token_bytes(size)  # noqa: E731
        self._protected = str(encoding.loads_object(pack(b"{}", random=random))["protected"]).encode()

    def pack(self, plaintext: bytes) -> bytes:
        """Encrypt a plaintext."""
        iv = token_bytes(_IV_SIZE)
        sealed = bindings.crypto_aead_chacha20poly1305_ietf_encrypt(plaintext, self._protected, iv, self._cek)
        iv_text, content, tag = map(encoding.encode_base64url, (iv, sealed[:-_TAG_SIZE], sealed[-_TAG_SIZE:]))
        protected = self._protected.decode()
        return f'{{"protected":"{protected}","iv":"{iv_text}","ciphertext":"{content}","tag":"{tag}"}}'.encode()


class BlockingV1Wallet(V1Wallet):
    """A wallet whose requests block, for :func:`run_blocking`."""

    async def post(self, body: bytes, *, url: str | None = None, media_type: str | None = None) -> HTTPResponse:
        """POST to the mediator."""
        connection: Any = self._http
        request = encode_request(url or self.mediator.http_uri, body, media_type or self.media_type)
        response: HTTPResponse = connection.exchange(request)
        if "content-type" in response.headers:
            response.headers["content-type"] = response.headers["content-type"].partition(";")[0]
        return response


@dataclass(frozen=True, slots=True)
class V1WalletGroup:
    """
    Wallets of one mediator, with the recipient key of each.

    :param endpoint: for forwards to them, which are encrypted to `routing_key`.
    """

    wallets: Sequence[BlockingV1Wallet]
    recipients: Sequence[SigningKey]
    endpoint: str
    routing_key: str

    @classmethod
    def connect(cls, invitation: V1Invitation, count: int, **handshake: Any) -> V1WalletGroup:
        """
        Connect wallets with a mediator, and register a key for each.

        :param handshake: further options of it.
        :raise RuntimeError: the mediator refused.
        """
        http: Any = KeepAliveClient(invitation.endpoint)
        clock: Any = SystemClock()
        wallets, recipients = [], []
        for _ in range(count):
            wallet = run_blocking(BlockingV1Wallet.connect(invitation, http, clock, **handshake))
            assert isinstance(wallet, BlockingV1Wallet)
            granted = run_blocking(wallet.enrol())
            recipients.append(run_blocking(wallet.add_key()))
            wallets.append(wallet)
        (key,) = granted.routing_keys
        return cls(wallets, recipients, granted.endpoint, parse_key(key))

    def forwards(self, size: int, count: int) -> Iterator[tuple[bytes, str]]:
        """
        Different forwards to the wallets' keys in turn, and the `tag` of the envelope in each.

        :param size: of the innermost plaintext, in bytes.
        """
        headers = cycle([EnvelopeHeader(partial(pack_anoncrypt, to=self.routing_key)) for _ in range(_HEADERS)])
        plaintexts = cycle([self._build_forward(one, size) for one in self.recipients])
        for header, plaintext in islice(zip(headers, plaintexts, strict=False), count):
            # Only the wallet could tell that it is not the tag of the content.
            tag = token_hex(_TAG_SIZE)[: len(_PLACE_OF_TAG)]
            yield header.pack(plaintext.replace(_PLACE_OF_TAG.encode(), tag.encode())), tag

    def count_queued(self) -> int:
        """Number of messages queued for the wallets, according to the mediator."""
        return sum(run_blocking(wallet.status()).message_count for wallet in self.wallets)

    def _build_forward(self, recipient: SigningKey, size: int) -> bytes:
        message = compose_v1_message(BASIC_MESSAGE, {"content": ""})
        rest = max(0, size - len(encoding.dumps(message)))
        message["content"] = token_hex(rest)[:rest]
        inner = encoding.loads_object(pack_anoncrypt(encoding.dumps(message), recipient.did_key))
        forward = build_v1_forward(recipient.did_key, encoding.dumps(inner | {"tag": _PLACE_OF_TAG}))
        return encoding.dumps(forward)


class V1LiveSocket:
    """A wallet's WebSocket to its mediator, for live delivery by Message Pickup 2.0."""

    def __init__(self, wallet: BlockingV1Wallet) -> None:
        if wallet.mediator.ws_uri is None:
            raise RuntimeError("the mediator's DID document names no WebSocket")
        self.socket = WebSocketClient(wallet.mediator.ws_uri)
        self.fileno, self.close = self.socket.fileno, self.socket.close
        self._header = EnvelopeHeader(partial(pack_authcrypt, to=wallet.mediator.key, sender=wallet.key))
        public = derive_agreement_key(wallet.mediator.key)
        self._shared_key = bindings.crypto_box_beforenm(public, wallet.key.agreement_secret)

    def enable_live_delivery(self) -> None:
        """
        Turn live delivery on.

        :raise UnreadableMessage: it was not confirmed.
        """
        if read_v1_status(self._ask("live-delivery-change", live_delivery=True)).live_delivery is False:
            raise UnreadableMessage("live delivery was not turned on")

    def count_queued(self) -> int:
        """Number of messages queued for the wallet."""
        return read_v1_status(self._ask("status-request")).message_count

    def acknowledge(self, ids: list[str]) -> None:
        """Acknowledge messages as wallets do, whose status is not waited for."""
        self._send("messages-received", message_id_list=ids)

    def take_deliveries(self, *most: int) -> Iterator[list[tuple[str, str]]]:
        """Read what has arrived: id and envelope's `tag` of each message of each delivery."""
        for message in map(self._open, self.socket.take(*most)):
            if message.type.name != "status":
                delivered = read_v1_delivery(message)
                yield [(one.id, encoding.loads_object(one.payload)["tag"]) for one in delivered]

    def _send(self, name: str, **members: Any) -> str:
        """Send a request; its id."""
        message = compose_v1_message(f"{PICKUP_2}/{name}", members, return_route="all")
        self.socket.send(self._header.pack(encoding.dumps(message)))
        return str(message["@id"])

    def _ask(self, name: str, **members: Any) -> V1Message:
        """The response to a request. What arrives before is ignored."""
        id_ = self._send(name, **members)
        while True:
            for message in map(self._open, self.socket.take()):
                if message.thid == id_:
                    return message

    def _open(self, raw: bytes) -> V1Message:
        """Decrypt a message of the mediator, whose key is the only one that this takes for the sender's."""
        value = encoding.loads_object(raw)
        (recipient,) = encoding.loads_object(encoding.decode_base64(value["protected"]))["recipients"]
        sealed, nonce = (
            encoding.decode_base64(part) for part in (recipient["encrypted_key"], recipient["header"]["iv"])
        )
        cek = bindings.crypto_box_open_afternm(sealed, nonce, self._shared_key)
        iv, content, tag = (encoding.decode_base64(value[name]) for name in ("iv", "ciphertext", "tag"))
        plaintext = bindings.crypto_aead_chacha20poly1305_ietf_decrypt(
            content + tag, value["protected"].encode(), iv, cek
        )
        return parse_message(plaintext)


def fetch_invitation(url: str) -> V1Invitation:
    """The DIDComm v1 invitation of a daemon. :param url: its public URL."""
    return V1Invitation.from_json(encoding.loads_object(fetch(f"{url}/invitation/v1")))
