"""
Web Push: requests (RFC 8030), their encryption for the subscriber (RFC 8291), and the identification of this server
(VAPID, RFC 8292).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

import http_ece
import orjson
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from py_vapid import Vapid
from py_vapid.jwt import sign
from pybase64 import urlsafe_b64decode, urlsafe_b64encode
from twisted.internet.interfaces import IReactorTime

from mediatord.net.outbound_http import (
    OutboundAddressError,
    OutboundError,
    OutboundHTTPClient,
    OutboundResponse,
    get_origin,
)
from mediatord.push.devices import ServiceName, WebPushDevice
from mediatord.push.service import REQUEST_TIMEOUT, PushResult, Wakeup
from mediatord.runtime.secret_files import SecretFileError, read_secret_file

# How long a push service keeps a message for a user agent that is offline, at most: four weeks.
_TTL = b"2419200"
# A phone in power saving receives nothing of less urgency until its user looks at it.
_URGENCY = b"high"
_TOPIC_LENGTH = 32
# Plain text that fits into the 4096 bytes which every push service accepts (RFC 8291 4).
_MAX_CONTENT_BYTES = 3993
# Tokens are valid for half the permitted time, and used for half of that; clocks of servers differ.
_TOKEN_SECONDS, _TOKEN_USE_SECONDS = 43_200, 21_600
# Origins of which the token is kept; whoever registers a device chooses them.
_MAX_TOKENS = 1000
_CREATED = frozenset((200, 201, 202, 204))
_GONE = frozenset((404, 410))
_FORBIDDEN, _TOO_LARGE, _TIMEOUT, _TOO_MANY, _SERVER_ERROR = 403, 413, 408, 429, 500
# How services say that a subscription was made for another VAPID key; a 403 has other causes too.
_KEY_MISMATCHES = (b"VapidPkHashMismatch", b"do not correspond to the credentials used to create the subscription")


@dataclass(frozen=True, slots=True)
class VAPIDKey:
    """
    The key that identifies this server to push services.

    :param public: uncompressed point, base64url without padding: the `applicationServerKey` of subscriptions.
    """

    private: ec.EllipticCurvePrivateKey = field(repr=False)
    public: str


def load_vapid_key(path: Path) -> VAPIDKey:
    """
    Read a private key: PEM, or base64url of the 32 bytes or of DER, as other servers write it. Nothing is sent.

    :raise SecretFileError: it is unreadable, accessible to others, or not such a key.
    """
    content = read_secret_file(path).strip()
    try:
        if content.startswith(b"-----BEGIN"):
            key: object = load_pem_private_key(content, password=None)
        else:
            key = Vapid.from_string(content.decode("ascii")).private_key
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise SecretFileError(f"{path}: expected an unencrypted private key of the curve P-256, in PEM or base64url")
    point = key.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)
    return VAPIDKey(key, urlsafe_b64encode(point).rstrip(b"=").decode())


class VAPIDTokenCache:
    """
    Signed tokens, one for each origin.

    :param contact: how push services can reach the operator: a mailto: or https: URL.
    """

    def __init__(self, key: VAPIDKey, contact: str, clock: IReactorTime) -> None:
        self._key = key
        self._contact = contact
        self._clock = clock
        self._headers: OrderedDict[str, tuple[float, bytes]] = OrderedDict()

    def get(self, origin: str) -> bytes:
        """The Authorization header for requests to an origin."""
        now = self._clock.seconds()
        signed_at, header = self._headers.get(origin, (0.0, b""))
        if header and 0 <= now - signed_at < _TOKEN_USE_SECONDS:
            self._headers.move_to_end(origin)
            return header
        token = sign({"aud": origin, "exp": int(now) + _TOKEN_SECONDS, "sub": self._contact}, self._key.private)
        header = f"vapid t={token},k={self._key.public}".encode("ascii")
        self._headers[origin] = now, header
        self._headers.move_to_end(origin)
        if len(self._headers) > _MAX_TOKENS:
            self._headers.popitem(last=False)
        return header


class WebPushService:
    """
    Sends wake-ups to the endpoints of subscriptions: https URLs that wallets chose.

    :param client: keeps connections, and guards which addresses are connected to.
    :param contact: a mailto: or https: URL.
    """

    name: ServiceName = "web_push"

    def __init__(self, key: VAPIDKey, contact: str, client: OutboundHTTPClient) -> None:
        self._client = client
        self._tokens = VAPIDTokenCache(key, contact, client.reactor)

    def host_of(self, device: WebPushDevice) -> str:
        """Host and port of the endpoint; empty if it is not a URL."""
        try:
            return get_origin(device.endpoint).partition("://")[2]
        except OutboundAddressError:
            return ""

    async def send(self, device: WebPushDevice, wakeup: Wakeup) -> PushResult:
        """Send one request."""
        try:
            authorization = self._tokens.get(get_origin(device.endpoint))
            body = encrypt(make_content(wakeup), device)
        except OutboundAddressError:
            return PushResult("rejected", "invalid_endpoint")
        except ValueError:
            return PushResult("rejected", "invalid_key")
        headers = {
            b"Content-Encoding": b"aes128gcm",
            b"TTL": _TTL,
            b"Urgency": _URGENCY,
            b"Topic": make_topic(wakeup.mediator),
            b"Authorization": authorization,
        }
        try:
            response = await self._client.post(
                device.endpoint,
                body,
                b"application/octet-stream",
                timeout=REQUEST_TIMEOUT,
                headers=headers,
                redirects=False,
                secure=True,
            )
        except OutboundAddressError as error:
            return PushResult("rejected", error.reason)
        except OutboundError as error:
            return PushResult("retry", error.reason)
        return _judge(response)

    async def close(self) -> None:
        """Abort what is in progress, and close connections."""
        await self._client.close()


def make_content(wakeup: Wakeup) -> bytes:
    """What the user agent decrypts: JSON, without the ids of messages if they are too many."""
    content: dict[str, object] = {"mediator": wakeup.mediator}
    if wakeup.message_ids:
        whole = orjson.dumps({**content, "message_ids": wakeup.message_ids})
        if len(whole) <= _MAX_CONTENT_BYTES:
            return whole
    return orjson.dumps(content)


def make_topic(mediator: str) -> bytes:
    """A new message replaces one of the same topic that has not been delivered (RFC 8030 5.4)."""
    return urlsafe_b64encode(hashlib.sha256(mediator.encode()).digest())[:_TOPIC_LENGTH]


def encrypt(content: bytes, device: WebPushDevice) -> bytes:
    """
    Encrypt for a subscription, with a key used once (RFC 8291 3).

    :raise ValueError: its keys are invalid.
    """
    point, secret = _decode(device.p256dh), _decode(device.auth)
    receiver = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), point)
    ephemeral = ec.generate_private_key(ec.SECP256R1())
    body: bytes = http_ece.encrypt(
        content, private_key=ephemeral, dh=receiver, auth_secret=secret, version="aes128gcm"
    )
    return body


def _decode(text: str) -> bytes:
    return urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))


def _judge(response: OutboundResponse) -> PushResult:
    """The outcome of a response (RFC 8030 5 to 8; RFC 8292 4.2)."""
    status = response.status
    if status in _CREATED:
        return PushResult("sent", "", status)
    if status in _GONE:
        return PushResult("gone", "subscription_gone", status)
    if status in (_TIMEOUT, _TOO_MANY) or status >= _SERVER_ERROR:
        return PushResult("retry", "unavailable", status, response.retry_after)
    if status == _FORBIDDEN and any(text in response.body for text in _KEY_MISMATCHES):
        return PushResult("mismatch", "vapid_key_mismatch", status)
    return PushResult("rejected", "too_large" if status == _TOO_LARGE else "refused", status)
