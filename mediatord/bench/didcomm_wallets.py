"""
The mediator behind a URL, of any make: by its DID, its invitation or its did:web (reference 7.4, 8.4).

Wallets that the daemon knows, and prepared forwards to them.

What a wallet and its mediator say to each other, packed and read as cheaply as can be.

A load generator competes with what it measures, so everything that may be is computed once: the secret of the two
static keys, and one ephemeral key with all that follows from it. A sender with nothing to hide may use that again;
the mediator sees ordinary authcrypts and has the usual work with each. What the mediator says in another shape than
the usual is read by the wallet's own, slower code.
"""

from __future__ import annotations

import base64
import http.client
import json
import secrets
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cryptography.hazmat.primitives.keywrap import InvalidUnwrap, aes_key_unwrap, aes_key_wrap

from mediatord.errors import MediatorError
from mediatord.protocol import encoding
from mediatord.protocol.canonical_did import canonicalize_did
from mediatord.protocol.didcomm.did_document import parse_did_document
from mediatord.protocol.didcomm.jwe_algorithms import (
    AUTHCRYPT,
    CONTENT_CIPHERS,
    build_other_info,
    compute_apv,
    derive_kek,
)
from mediatord.protocol.didcomm.keys import PrivateKey, PublicKey
from mediatord.protocol.didcomm.message import ENCRYPTED_MEDIA_TYPE, Message
from mediatord.protocol.encoding import decode_base64url, dumps, encode_base64url, loads_object
from mediatord.wallet.didcomm_client import DIDCommMediator
from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.didcomm_messages import (
    BASIC_MESSAGE,
    DIDDocumentCache,
    UnreadableMessage,
    anoncrypt,
    authcrypt,
    build_forward,
    compose_message,
    unpack_message,
)

_DISCOVERY_TIMEOUT_SECONDS = 30
_MAX_RESPONSE_BYTES = 1 << 20


def find_mediator(url: str, did: str | None = None) -> DIDCommMediator:
    """
    Ask at a URL who is there.

    :param url: of the mediator, or of an out-of-band invitation of it.
    :param did: its DID, if that is known.
    :raise RuntimeError: nothing there says who it is, or its DID does not resolve.
    """
    for found in [did] if did else _advertised_dids(url):
        try:
            return _resolve_mediator(found, url)
        except (LookupError, MediatorError, UnreadableMessage, ValueError, OSError):
            continue
    raise RuntimeError(f"no DIDComm mediator is known at {url}: give its DID by --target-did")


def _advertised_dids(url: str) -> Iterator[str]:
    invitation = parse_qs(urlsplit(url).query).get("_oob")
    if invitation:
        yield _invitation_sender(base64.urlsafe_b64decode(invitation[0] + "=="))
        return
    root = url.rstrip("/")
    for place in (f"{root}/did", f"{root}/invitation", root, f"{root}/.well-known/did.json"):
        try:
            text = _fetch(place)
        except (OSError, ValueError):
            continue
        if text.startswith(b"did:"):
            yield text.decode("ascii", "replace").strip()
        elif did := _invitation_sender(text):
            yield did


def _invitation_sender(text: bytes) -> str:
    """`from` of an invitation, or `id` of a DID document; empty if it is neither."""
    try:
        value: Any = json.loads(text)
    except ValueError:
        return ""
    found = value.get("from", value.get("id")) if isinstance(value, dict) else None
    return found if isinstance(found, str) and found.startswith("did:") else ""


def _resolve_mediator(did: str, url: str) -> DIDCommMediator:
    if not did.startswith("did:web:"):
        return DIDCommMediator.from_did(did)
    parts = urlsplit(url)
    document = json.loads(_fetch(f"{parts.scheme}://{parts.netloc}/.well-known/did.json"))
    return DIDCommMediator.of(parse_did_document(did, document))


def _fetch(url: str) -> bytes:
    request = urllib.request.Request(url, headers={"Accept": "application/json, text/plain"})
    try:
        with urllib.request.urlopen(request, timeout=_DISCOVERY_TIMEOUT_SECONDS) as response:
            content: bytes = response.read(_MAX_RESPONSE_BYTES)
            return content
    except urllib.error.URLError as error:
        raise OSError(str(error.reason)) from None


_COORDINATION = "https://didcomm.org/coordinate-mediation"
# The newest first, and what it calls an update of the list.
_COORDINATION_VERSIONS = {"3.0": "recipient-update", "2.0": "keylist-update"}
_ENROLMENT_TIMEOUT_SECONDS = 30


@dataclass(frozen=True, slots=True)
class WalletGroup:
    """
    :param wallets: enrolled, each registered under its own DID.
    :param routing: whom forwards are encrypted for, if the mediator grants another DID than its own.
    """

    mediator: DIDCommMediator
    wallets: tuple[WalletIdentity, ...]
    routing: DIDCommMediator | None = None

    @property
    def hop(self) -> DIDCommMediator:
        """Whom forwards are encrypted for."""
        return self.routing or self.mediator


def fetch_mediator(url: str) -> DIDCommMediator:
    """The mediator that a daemon says it is."""
    with urllib.request.urlopen(f"{url}/did", timeout=_ENROLMENT_TIMEOUT_SECONDS) as response:
        return DIDCommMediator.from_did(response.read().decode("ascii").strip())


def pack_request(wallet: WalletIdentity, mediator: DIDCommMediator, type_: str, body: Mapping[str, Any]) -> bytes:
    """A packed request of a wallet."""
    headers = {"from": wallet.did, "to": [mediator.did], "return_route": "all"}
    return authcrypt(compose_message(type_, body, **headers), wallet, mediator.document)


def enrol_group(url: str, count: int, *, short: bool = False) -> WalletGroup:
    """
    Make wallets and enrol them.

    :param short: their DIDs name no service, a quarter of the length of those that name the mediator as theirs.
    :raise RuntimeError: the daemon did not do as asked.
    """
    return enrol_group_at(fetch_mediator(url), count, short=short)


def enrol_group_at(mediator: DIDCommMediator, count: int, *, short: bool = False) -> WalletGroup:
    """
    The same at a mediator of any make, by Coordinate Mediation 3.0, or by 2.0 if it knows no 3.0.

    :raise RuntimeError: it did not do as asked.
    """
    wallets = tuple(WalletIdentity.fresh(endpoint=None if short else mediator.did) for _ in range(count))
    with closing(_EnrolmentConnection(mediator)) as enrolling:
        granted = {enrolling.enrol(wallet) for wallet in wallets} - {mediator.did}
    return WalletGroup(mediator, wallets, _resolve_routing_did(granted))


def unregister_group(group: WalletGroup) -> None:
    """
    Take the wallets' DIDs off the mediator's list again.

    :raise RuntimeError: it did not do as asked.
    """
    with closing(_EnrolmentConnection(group.mediator)) as enrolling:
        for wallet in group.wallets:
            enrolling.update(wallet, "remove")


def _resolve_routing_did(granted: set[str]) -> DIDCommMediator | None:
    try:
        return DIDCommMediator.from_did(granted.pop()) if granted else None
    except (LookupError, MediatorError, UnreadableMessage):
        return None  # what it grants is a name of itself that needs a network


class _EnrolmentConnection:
    """One connection on which wallets ask for mediation, in the newest version that is understood."""

    def __init__(self, mediator: DIDCommMediator) -> None:
        target = urlsplit(mediator.http_uri)
        self._mediator = mediator
        self._path = target.path or "/"
        self._connection = http.client.HTTPConnection(
            target.hostname or "", target.port, timeout=_ENROLMENT_TIMEOUT_SECONDS
        )
        self._versions = list(_COORDINATION_VERSIONS)
        self._book = DIDDocumentCache()
        self._book.learn(mediator.document)

    def close(self) -> None:
        """The connection."""
        self._connection.close()

    def enrol(self, wallet: WalletIdentity) -> str:
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

    def update(self, wallet: WalletIdentity, action: str) -> None:
        """Put the wallet's DID on the list, or take it off."""
        names = _COORDINATION_VERSIONS[self._versions[0]]
        self._ask(wallet, names, {"updates": [{"recipient_did": wallet.did, "action": action}]}, f"{names}-response")

    def _ask(self, wallet: WalletIdentity, name: str, body: Mapping[str, Any], answer: str) -> dict[str, Any]:
        protocol = f"{_COORDINATION}/{self._versions[0]}"
        packed = pack_request(wallet, self._mediator, f"{protocol}/{name}", body)
        self._connection.request("POST", self._path, packed, {"Content-Type": ENCRYPTED_MEDIA_TYPE})
        response = self._connection.getresponse()
        raw = response.read()
        try:
            message = unpack_message(raw, wallet, self._book.resolve).message
        except UnreadableMessage:
            raise RuntimeError(f"the mediator answered {response.status} to {name}") from None
        if response.status != 200 or message.type.uri != f"{protocol}/{answer}":
            raise RuntimeError(f"the mediator answered {response.status} to {name}")
        return message.body or {}


def unpack_answer(raw: bytes, wallet: WalletIdentity) -> Message:
    """A packed answer of the mediator."""
    return unpack_message(raw, wallet, DIDDocumentCache().resolve).message


def build_forwards(group: WalletGroup, size: int, count: int, *, payloads: int = 1) -> list[bytes]:
    """
    Envelopes as they are POSTed, to the wallets in turn, each with keys of its own.

    :param size: of the plaintext in an inner envelope, in bytes.
    :param payloads: inner envelopes in each forward.
    """
    mediator = group.hop
    packed = []
    for wallet in islice(cycle(group.wallets), count):
        letters = [build_inner_envelope(wallet, size) for _ in range(payloads)]
        packed.append(anoncrypt(build_forward(wallet.did, letters, to=[mediator.did]), mediator.document))
    return packed


def build_tagged_forwards(group: WalletGroup, size: int, count: int) -> Iterator[tuple[bytes, str]]:
    """
    Forwards of one envelope each, and the `tag` of that envelope, by which it is known when it comes out again.

    :param size: as for :func:`forwards`.
    """
    mediator = group.hop
    for wallet in islice(cycle(group.wallets), count):
        inner = build_inner_envelope(wallet, size)
        packed = anoncrypt(build_forward(wallet.did, [inner], to=[mediator.did]), mediator.document)
        yield packed, encoding.loads_object(inner)["tag"]


def build_inner_envelope(wallet: WalletIdentity, size: int) -> bytes:
    """What is stored: a message to a wallet whose plaintext has this many bytes, or as few as one can have."""
    message = compose_message(BASIC_MESSAGE, {"content": ""}, to=[wallet.did])
    rest = max(0, size - len(encoding.dumps(message)))
    message["body"]["content"] = secrets.token_hex(rest)[:rest]
    return anoncrypt(message, wallet.document)


PICKUP = "https://didcomm.org/messagepickup/3.0"

_CONTENT_CIPHER = CONTENT_CIPHERS["A256CBC-HS512"]


class FastMessageCodec:
    """
    Goes between one wallet and its mediator.

    :raise Unreadable: the mediator has no X25519 key.
    """

    def __init__(self, wallet: WalletIdentity, mediator: DIDCommMediator) -> None:
        self.wallet = wallet
        self.mediator = mediator
        self._book = DIDDocumentCache()
        self._book.learn(mediator.document)
        private = wallet.agreement.private
        methods = [one for one in mediator.document.key_agreement if one.key.curve == private.curve]
        if not methods:
            raise UnreadableMessage("the mediator has no X25519 key")
        self._statics = {one.id: private.exchange(one.key) for one in methods}
        kid, key = methods[0].id, methods[0].key
        ephemeral = PrivateKey.generate(private.curve)
        self._secret = ephemeral.exchange(key) + self._statics[kid]
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

        :param route: `return_route`: `all` for an answer on the same connection, `none` for none.
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

        :raise Unreadable: it is not authentic, or not from the mediator.
        """
        try:
            return self._opened(raw)
        except (KeyError, TypeError, ValueError, InvalidUnwrap):
            opened = unpack_message(raw, self.wallet, self._book.resolve)
        if opened.sender is None or canonicalize_did(opened.sender) != canonicalize_did(self.mediator.did):
            raise UnreadableMessage("not authenticated as the mediator")
        return loads_object(opened.plaintext)

    def _opened(self, raw: bytes) -> dict[str, Any]:
        value = loads_object(raw)
        protected = value["protected"]
        header = loads_object(decode_base64url(protected))
        if header["alg"] != AUTHCRYPT:
            raise ValueError("another algorithm")
        secret = self.wallet.agreement.private.exchange(PublicKey.from_jwk(header["epk"]))
        info = build_other_info(AUTHCRYPT, decode_base64url(header["apu"]), decode_base64url(header["apv"]))
        tag = decode_base64url(value["tag"])
        wrapped = decode_base64url(value["recipients"][0]["encrypted_key"])
        key = aes_key_unwrap(derive_kek(secret + self._statics[header["skid"]], info, tag), wrapped)
        data = decode_base64url(value["ciphertext"])
        return loads_object(
            _CONTENT_CIPHER.decrypt(key, decode_base64url(value["iv"]), data, tag, protected.encode())
        )


def read_delivery_ids(delivery: Mapping[str, Any]) -> list[tuple[str, str]]:
    """
    Of each message in a `delivery`: what it is acknowledged by, and the tag of its envelope, by which it is known.

    :raise Unreadable: it is no delivery.
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
