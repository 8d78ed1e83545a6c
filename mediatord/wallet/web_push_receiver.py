"""
The receiving side of Web Push: a push service on loopback (RFC 8030, RFC 8292), and the subscriptions of user agents,
which decrypt what it delivers (RFC 8291).
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from typing import Any

import http_ece
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwcrypto.common import JWException
from jwcrypto.jwk import JWK
from jwcrypto.jws import JWS
from twisted.internet.defer import Deferred, DeferredQueue
from twisted.web.resource import Resource
from twisted.web.server import Request, Site

from mediatord.protocol import encoding
from mediatord.wallet.didcomm_messages import UnreadableMessage

_LOOPBACK = "127.0.0.1"
_PATH_BYTES = 24
_AUTH_BYTES = 16
# What every push service accepts (RFC 8030 7.2), and the longest validity of a token (RFC 8292 2).
_MAX_BODY_BYTES = 4096
_MAX_TOKEN_SECONDS = 86_400
_AUTHORIZATION = re.compile(r"vapid t=([A-Za-z0-9_.-]+), ?k=([A-Za-z0-9_-]+)")
_CREATED, _BAD_REQUEST, _FORBIDDEN, _NOT_FOUND, _TOO_LARGE, _UNSUPPORTED = 201, 400, 403, 404, 413, 415


class PushRefused(Exception):
    """The push service refused a message; the text says why."""

    def __init__(self, status: int, reason: str) -> None:
        self.status = status
        super().__init__(f"the push service refused a wake-up: {reason}")


@dataclass(frozen=True, slots=True)
class _UserAgentKeys:
    """What a user agent decrypts with."""

    private: ec.EllipticCurvePrivateKey = field(repr=False)
    auth: bytes = field(repr=False)


class WebPushSubscription:
    """
    A subscription of a user agent, such as a browser or an app with UnifiedPush.

    :param endpoint: URL at the push service.
    :param server_key: VAPID public key of the only server whose messages are delivered, base64url.
    """

    def __init__(self, endpoint: str, server_key: str) -> None:
        self.endpoint = endpoint
        self.server_key = server_key
        self._received: DeferredQueue[bytes | PushRefused] = DeferredQueue()
        self._keys = _UserAgentKeys(ec.generate_private_key(ec.SECP256R1()), secrets.token_bytes(_AUTH_BYTES))

    def to_json(self) -> dict[str, Any]:
        """As `PushSubscription.toJSON()` of a browser."""
        point = self._keys.private.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)
        keys = {"p256dh": encoding.encode_base64url(point), "auth": encoding.encode_base64url(self._keys.auth)}
        return {"endpoint": self.endpoint, "expirationTime": None, "keys": keys}

    def put(self, received: bytes | PushRefused) -> None:
        """Called by the push service with what it delivers, or why it does not."""
        self._received.put(received)

    def next_message(self) -> Deferred[bytes]:
        """Fires with the next ciphertext; fails with :class:`PushRefused` if the push service did not deliver it."""
        return self._received.get().addCallback(_raise_refusal)

    def decrypt(self, ciphertext: bytes) -> bytes:
        """
        Decrypt a delivered message.

        :raise UnreadableMessage: it is not for this subscription.
        """
        try:
            plaintext: bytes = http_ece.decrypt(
                ciphertext, private_key=self._keys.private, auth_secret=self._keys.auth, version="aes128gcm"
            )
        except (http_ece.ECEException, ValueError):
            raise UnreadableMessage("a push message that does not open") from None
        return plaintext


def _raise_refusal(received: bytes | PushRefused) -> bytes:
    if isinstance(received, PushRefused):
        raise received
    return received


class WebPushReceiver:
    """
    A push service on loopback, over plain HTTP, which delivers at once and keeps nothing.

    :ivar url: its origin, once it listens.
    """

    url: str

    def __init__(self, reactor: Any) -> None:
        self._reactor = reactor
        self._subscriptions: dict[str, WebPushSubscription] = {}
        self._port: Any = None

    def start(self) -> None:
        """Listen on a free port."""
        self._port = self._reactor.listenTCP(0, _QuietSite(_PushResource(self)), interface=_LOOPBACK)
        self.url = f"http://{_LOOPBACK}:{self._port.getHost().port}"

    async def stop(self) -> None:
        """Stop listening."""
        stopped: Deferred[None] | None = self._port.stopListening()
        if stopped is not None:
            await stopped

    def subscribe(self, server_key: str) -> WebPushSubscription:
        """A new subscription, for messages of the server with this VAPID public key."""
        path = f"/push/{secrets.token_urlsafe(_PATH_BYTES)}"
        subscription = self._subscriptions[path] = WebPushSubscription(self.url + path, server_key)
        return subscription

    def receive(self, path: str, headers: dict[str, str], body: bytes) -> int:
        """
        Check a message and deliver it; the HTTP status.

        :param headers: by lower-case name.
        """
        subscription = self._subscriptions.get(path)
        if subscription is None:
            return _NOT_FOUND
        try:
            self._check(headers, body, subscription.server_key)
        except PushRefused as refusal:
            subscription.put(refusal)
            return refusal.status
        subscription.put(body)
        return _CREATED

    def _check(self, headers: dict[str, str], body: bytes, server_key: str) -> None:
        if not headers.get("ttl", "").isdigit():
            raise PushRefused(_BAD_REQUEST, "no TTL")
        if headers.get("content-encoding") != "aes128gcm":
            raise PushRefused(_UNSUPPORTED, "not encrypted with aes128gcm")
        if len(body) > _MAX_BODY_BYTES:
            raise PushRefused(_TOO_LARGE, "too large")
        credentials = _AUTHORIZATION.fullmatch(headers.get("authorization", ""))
        if credentials is None or credentials[2] != server_key:
            raise PushRefused(_FORBIDDEN, "not of the server that the subscription is for")
        claims = _verify_token(credentials[1], server_key)
        if claims.get("aud") != self.url:
            raise PushRefused(_FORBIDDEN, "a token for another push service")
        expires_at = claims.get("exp")
        now = self._reactor.seconds()
        if not isinstance(expires_at, int | float) or not now < expires_at <= now + _MAX_TOKEN_SECONDS:
            raise PushRefused(_FORBIDDEN, "an expired token, or one that is valid for more than a day")


def _verify_token(token: str, server_key: str) -> dict[str, Any]:
    """
    The claims of a VAPID token.

    :raise PushRefused: it was not signed with this key.
    """
    signature = JWS()
    signature.allowed_algs = ["ES256"]
    try:
        point = encoding.decode_base64url(server_key)
        x, y = encoding.encode_base64url(point[1:33]), encoding.encode_base64url(point[33:])
        signature.deserialize(token, JWK(kty="EC", crv="P-256", x=x, y=y))
        return encoding.loads_object(signature.payload)
    except (JWException, ValueError):
        raise PushRefused(_FORBIDDEN, "an invalid signature") from None


class _PushResource(Resource):
    """Endpoints of all subscriptions."""

    isLeaf = True

    def __init__(self, receiver: WebPushReceiver) -> None:
        super().__init__()
        self._receiver = receiver

    def render_POST(self, request: Request) -> bytes:
        """Deliver a message."""
        headers = {
            name.decode("latin-1").lower(): values[-1].decode("latin-1")
            for name, values in request.requestHeaders.getAllRawHeaders()
        }
        assert request.content is not None and request.path is not None
        path = request.path.decode("latin-1")
        request.setResponseCode(self._receiver.receive(path, headers, request.content.read(_MAX_BODY_BYTES + 1)))
        if request.code == _CREATED:
            request.setHeader(b"Location", f"{self._receiver.url}/message/{secrets.token_urlsafe(_PATH_BYTES)}")
        return b""


class _QuietSite(Site):
    noisy = False

    def log(self, request: Any) -> None:
        """No access log."""
