"""
DIDComm wallets of the benchmark: discovery of the mediator, enrolment, prepared forwards, and fast packing.

:class:`FastMessageCodec` computes the shared secrets of the static keys once and reuses one ephemeral key, because a
load generator competes with the mediator for CPU time. The mediator receives ordinary authcrypts.
"""

from __future__ import annotations

import base64
import json
import secrets
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cryptography.hazmat.primitives.keywrap import InvalidUnwrap, aes_key_unwrap, aes_key_wrap

from mediatord.bench.load_generator import KeepAliveClient, WebSocketClient
from mediatord.errors import MediatorError
from mediatord.protocol.canonical_did import canonicalize_did
from mediatord.protocol.didcomm.did_document import parse_did_document
from mediatord.protocol.didcomm.jwe import (
    AUTHCRYPT,
    CONTENT_CIPHERS,
    ENCRYPTED_MEDIA_TYPE,
    build_other_info,
    compute_apv,
    derive_kek,
)
from mediatord.protocol.didcomm.keys import PrivateKey, PublicKey
from mediatord.protocol.encoding import decode_base64url, dumps, encode_base64url, loads_object
from mediatord.wallet.didcomm_client import DIDCommMediator
from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.didcomm_mediation import PICKUP
from mediatord.wallet.didcomm_messages import (
    BASIC_MESSAGE,
    DIDDocumentCache,
    UnreadableMessage,
    anoncrypt,
    build_forward,
    compose_message,
    unpack_message,
)

_DISCOVERY_TIMEOUT_SECONDS = 30
_MAX_RESPONSE_BYTES = 1 << 20
_DISCOVERY_PATHS = ("/did", "/invitation", "", "/.well-known/did.json")
_COORDINATION = "https://didcomm.org/coordinate-mediation"
# The newest version first, with its name of the list update.
_COORDINATION_VERSIONS = {"3.0": "recipient-update", "2.0": "keylist-update"}
_CONTENT_CIPHER = CONTENT_CIPHERS["A256CBC-HS512"]


def find_mediator(url: str, did: str | None = None) -> DIDCommMediator:
    """
    Find the mediator at a URL by its DID, its invitation or its did:web document (reference 7.4, 8.4).

    :param url: of the mediator, or of its out-of-band invitation.
    :param did: its DID, if known.
    :raise RuntimeError: no DID is published there, or it does not resolve.
    """
    for candidate in [did] if did else _advertised_dids(url):
        try:
            if not candidate.startswith("did:web:"):
                return DIDCommMediator.from_did(candidate)
            parts = urlsplit(url)
            document = json.loads(_fetch(f"{parts.scheme}://{parts.netloc}/.well-known/did.json"))
            return DIDCommMediator.from_document(parse_did_document(candidate, document))
        except (LookupError, MediatorError, UnreadableMessage, ValueError, OSError):
            continue
    raise RuntimeError(f"no DIDComm mediator found at {url}; use --target-did to give its DID")


def _advertised_dids(url: str) -> Iterator[str]:
    invitation = parse_qs(urlsplit(url).query).get("_oob")
    if invitation:
        yield _read_did(base64.urlsafe_b64decode(invitation[0] + "=="))
        return
    for path in _DISCOVERY_PATHS:
        try:
            text = _fetch(url.rstrip("/") + path)
        except (OSError, ValueError):
            continue
        if did := _read_did(text):
            yield did


def _read_did(text: bytes) -> str:
    """A plain DID, `from` of an invitation or `id` of a DID document; empty if it is none of them."""
    if text.startswith(b"did:"):
        return text.decode("ascii", "replace").strip()
    try:
        value: Any = json.loads(text)
    except ValueError:
        return ""
    did = value.get("from", value.get("id")) if isinstance(value, dict) else None
    return did if isinstance(did, str) and did.startswith("did:") else ""


def _fetch(url: str) -> bytes:
    request = urllib.request.Request(url, headers={"Accept": "application/json, text/plain"})
    try:
        with urllib.request.urlopen(request, timeout=_DISCOVERY_TIMEOUT_SECONDS) as response:
            content: bytes = response.read(_MAX_RESPONSE_BYTES)
            return content
    except urllib.error.URLError as error:
        raise OSError(str(error.reason)) from None


class FastMessageCodec:
    """
    Packs and unpacks the messages between one wallet and its mediator.

    :raise UnreadableMessage: the mediator has no X25519 key.
    """

    def __init__(self, wallet: WalletIdentity, mediator: DIDCommMediator) -> None:
        self.wallet = wallet
        self.mediator = mediator
        self._documents = DIDDocumentCache()
        self._documents.add(mediator.document)
        private = wallet.agreement.private
        methods = [method for method in mediator.document.key_agreement if method.key.curve == private.curve]
        if not methods:
            raise UnreadableMessage("the mediator has no X25519 key")
        self._static_secrets = {method.id: private.exchange(method.key) for method in methods}
        kid, key = methods[0].id, methods[0].key
        ephemeral = PrivateKey.generate(private.curve)
        self._secret = ephemeral.exchange(key) + self._static_secrets[kid]
        skid, apv = wallet.agreement.kid, compute_apv([kid])
        self._info = build_other_info(AUTHCRYPT, skid.encode(), apv)
        header = {
            "typ": ENCRYPTED_MEDIA_TYPE,
            "alg": AUTHCRYPT,
            "enc": "A256CBC-HS512",
            "epk": ephemeral.public.jwk(),
            "apv": encode_base64url(apv),
            "apu": encode_base64url(skid.encode()),
            "skid": skid,
        }
        self._protected = encode_base64url(dumps(header)).encode()
        self._frame = f'{{"protected":"{self._protected.decode()}","recipients":[{{"header":{{"kid":"{kid}"}},'

    def request(self, type_: str, body: Mapping[str, Any], *, route: str = "all") -> bytes:
        """
        A packed request of the wallet.

        :param route: `return_route`: `all` for a response on the same connection, `none` for none.
        """
        headers = {"from": self.wallet.did, "to": [self.mediator.did], "return_route": route}
        return self.seal(dumps(compose_message(type_, body, **headers)))

    def acknowledgement(self, ids: list[str], *, route: str = "none") -> bytes:
        """A packed `messages-received`."""
        return self.request(f"{PICKUP}/messages-received", {"message_id_list": ids}, route=route)

    def seal(self, plaintext: bytes) -> bytes:
        """An authcrypt from the wallet to the mediator."""
        key = secrets.token_bytes(_CONTENT_CIPHER.key_size)
        iv, data, tag = _CONTENT_CIPHER.encrypt(key, plaintext, self._protected)
        wrapped = aes_key_wrap(derive_kek(self._secret, self._info, tag), key)
        return (
            f'{self._frame}"encrypted_key":"{encode_base64url(wrapped)}"}}],"iv":"{encode_base64url(iv)}",'
            f'"ciphertext":"{encode_base64url(data)}","tag":"{encode_base64url(tag)}"}}'
        ).encode()

    def open(self, raw: bytes) -> dict[str, Any]:
        """
        The plaintext of an authcrypt from the mediator.

        :raise UnreadableMessage: it is not authentic, or not from the mediator.
        """
        try:
            return self._open_fast(raw)
        except (KeyError, TypeError, ValueError, InvalidUnwrap):
            opened = unpack_message(raw, self.wallet, self._documents.resolve)
        if opened.sender is None or canonicalize_did(opened.sender) != canonicalize_did(self.mediator.did):
            raise UnreadableMessage("not authenticated as the mediator")
        return loads_object(opened.plaintext)

    def _open_fast(self, raw: bytes) -> dict[str, Any]:
        value = loads_object(raw)
        protected = value["protected"]
        header = loads_object(decode_base64url(protected))
        if header["alg"] != AUTHCRYPT:
            raise ValueError("another algorithm")
        secret = self.wallet.agreement.private.exchange(PublicKey.from_jwk(header["epk"]))
        info = build_other_info(AUTHCRYPT, decode_base64url(header["apu"]), decode_base64url(header["apv"]))
        tag = decode_base64url(value["tag"])
        wrapped = decode_base64url(value["recipients"][0]["encrypted_key"])
        key = aes_key_unwrap(derive_kek(secret + self._static_secrets[header["skid"]], info, tag), wrapped)
        data = decode_base64url(value["ciphertext"])
        return loads_object(
            _CONTENT_CIPHER.decrypt(key, decode_base64url(value["iv"]), data, tag, protected.encode())
        )


def read_delivery_ids(delivery: Mapping[str, Any]) -> list[tuple[str, str]]:
    """
    Attachment id and tag of the envelope of each message in a `delivery`.

    :raise UnreadableMessage: it is not a delivery.
    """
    found = []
    try:
        for attachment in delivery["attachments"]:
            data = attachment["data"]
            inner = data["json"] if "json" in data else loads_object(decode_base64url(data["base64"]))
            found.append((attachment["id"], inner["tag"]))
    except (KeyError, TypeError, ValueError):
        raise UnreadableMessage("not a delivery") from None
    return found


@dataclass(frozen=True, slots=True)
class WalletGroup:
    """
    Wallets enrolled at one mediator, each registered under its own DID.

    :param routing: whom forwards are encrypted for, if the mediator grants another DID than its own.
    """

    mediator: DIDCommMediator
    wallets: tuple[WalletIdentity, ...]
    routing: DIDCommMediator | None = None

    @property
    def hop(self) -> DIDCommMediator:
        """Whom forwards are encrypted for."""
        return self.routing or self.mediator

    def make_codecs(self) -> list[FastMessageCodec]:
        """A codec for each wallet."""
        return [FastMessageCodec(wallet, self.mediator) for wallet in self.wallets]


def enrol_group(mediator: DIDCommMediator | str, count: int, *, short: bool = False) -> WalletGroup:
    """
    Create wallets and enrol them by Coordinate Mediation 3.0, or 2.0 if the mediator does not know 3.0.

    :param mediator: or its URL.
    :param short: DIDs without a service, a quarter of the length of those that name the mediator.
    :raise RuntimeError: the mediator refused.
    """
    if isinstance(mediator, str):
        mediator = find_mediator(mediator)
    wallets = tuple(WalletIdentity.generate(endpoint=None if short else mediator.did) for _ in range(count))
    with KeepAliveClient(mediator.http_uri) as http:
        coordination = _CoordinationClient(mediator, http)
        granted = {coordination.enrol(wallet) for wallet in wallets} - {mediator.did}
    routing = None
    if granted:
        try:
            routing = DIDCommMediator.from_did(granted.pop())
        except (LookupError, MediatorError, UnreadableMessage):
            pass  # an alias of the mediator that does not resolve locally
    return WalletGroup(mediator, wallets, routing)


def unregister_group(group: WalletGroup) -> None:
    """
    Unregister the wallets' DIDs.

    :raise RuntimeError: the mediator refused.
    """
    with KeepAliveClient(group.mediator.http_uri) as http:
        coordination = _CoordinationClient(group.mediator, http)
        for codec in group.make_codecs():
            coordination.update(codec, "remove")


class _CoordinationClient:
    """Coordinate Mediation over one HTTP connection, in the newest version that the mediator knows."""

    def __init__(self, mediator: DIDCommMediator, http: KeepAliveClient) -> None:
        self._mediator = mediator
        self._http = http
        self._versions = list(_COORDINATION_VERSIONS)

    def enrol(self, wallet: WalletIdentity) -> str:
        """Enrol a wallet and register its DID; the routing DID that is granted."""
        codec = FastMessageCodec(wallet, self._mediator)
        while True:
            try:
                body = self._ask(codec, "mediate-request", {}, "mediate-grant")
                break
            except RuntimeError:
                if len(self._versions) == 1:
                    raise
                self._versions.pop(0)
        self.update(codec, "add")
        # 2.0 has a string, 3.0 a list.
        dids = body.get("routing_did")
        return str(dids[0] if isinstance(dids, list) and dids else dids or self._mediator.did)

    def update(self, codec: FastMessageCodec, action: str) -> None:
        """Add the wallet's DID to the list, or remove it."""
        name = _COORDINATION_VERSIONS[self._versions[0]]
        updates = [{"recipient_did": codec.wallet.did, "action": action}]
        self._ask(codec, name, {"updates": updates}, f"{name}-response")

    def _ask(self, codec: FastMessageCodec, name: str, body: Mapping[str, Any], expected: str) -> dict[str, Any]:
        protocol = f"{_COORDINATION}/{self._versions[0]}"
        response = self._http.post(codec.request(f"{protocol}/{name}", body))
        try:
            message = codec.open(response.body)
        except (UnreadableMessage, ValueError):
            message = {}
        if response.status != 200 or message.get("type") != f"{protocol}/{expected}":
            raise RuntimeError(f"the mediator answered {response.status} to {name}")
        return message.get("body") or {}


class LiveSocket:
    """A wallet's WebSocket to its mediator, for live delivery."""

    def __init__(self, codec: FastMessageCodec, socket: WebSocketClient) -> None:
        self.codec = codec
        self.socket = socket

    def enable_live_delivery(self) -> None:
        """
        Turn live delivery on.

        :raise UnreadableMessage: it was not confirmed.
        """
        status = self._ask("live-delivery-change", {"live_delivery": True})
        if status["body"].get("live_delivery") is False:
            raise UnreadableMessage("live delivery was not turned on")

    def count_queued(self) -> int:
        """Number of messages queued for the wallet."""
        return int(self._ask("status-request", {})["body"]["message_count"])

    def _ask(self, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a Pickup request; its `status` response. Pushes that arrive before are ignored."""
        self.socket.send(self.codec.request(f"{PICKUP}/{name}", body))
        while True:
            for raw in self.socket.take():
                message = self.codec.open(raw)
                if message["type"] == f"{PICKUP}/status":
                    return message
                if message["type"] != f"{PICKUP}/delivery":
                    raise UnreadableMessage(f"the mediator answered with a {message['type']}")


def build_forwards(group: WalletGroup, size: int, count: int, *, payloads: int = 1) -> list[bytes]:
    """
    Forwards ready to be posted, to the wallets in turn, each with its own keys.

    :param size: of the innermost plaintext, in bytes.
    :param payloads: inner envelopes in each forward.
    """
    hop = group.hop
    packed = []
    for wallet in islice(cycle(group.wallets), count):
        inner = [build_inner_envelope(wallet, size) for _ in range(payloads)]
        packed.append(anoncrypt(build_forward(wallet.did, inner, to=[hop.did]), hop.document))
    return packed


def build_tagged_forwards(group: WalletGroup, size: int, count: int) -> Iterator[tuple[bytes, str]]:
    """Forwards as of :func:`build_forwards`, each with the `tag` of its inner envelope, which identifies a push."""
    hop = group.hop
    for wallet in islice(cycle(group.wallets), count):
        inner = build_inner_envelope(wallet, size)
        packed = anoncrypt(build_forward(wallet.did, [inner], to=[hop.did]), hop.document)
        yield packed, loads_object(inner)["tag"]


def build_inner_envelope(wallet: WalletIdentity, size: int) -> bytes:
    """An anoncrypt for a wallet whose plaintext has `size` bytes, or the least possible number."""
    message = compose_message(BASIC_MESSAGE, {"content": ""}, to=[wallet.did])
    rest = max(0, size - len(dumps(message)))
    message["body"]["content"] = secrets.token_hex(rest)[:rest]
    return anoncrypt(message, wallet.document)
