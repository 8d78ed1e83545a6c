"""A push service (RFC 8030) that checks VAPID (RFC 8292), and user agents that decrypt its messages (RFC 8291)."""

from __future__ import annotations

import json
import re
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from pathlib import Path
from time import time  # noqa: TID251  this is a server with a clock of its own
from typing import Any
from urllib.parse import urlsplit

import http_ece
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwcrypto.common import JWException
from jwcrypto.jwk import JWK
from jwcrypto.jwt import JWT

from mediatord.push.devices import WebPushDevice
from tests.push.scripted_server import Answer, ReceivedRequest, ScriptedServer

MAX_BODY_BYTES = 4096
MAX_TOKEN_SECONDS = 86_400
_AUTHORIZATION = re.compile(r"vapid t=([A-Za-z0-9_.-]+), ?k=([A-Za-z0-9_-]+)")
_TOPIC = re.compile(r"[A-Za-z0-9_-]{1,32}")
_URGENCIES = {"very-low", "low", "normal", "high"}

KEY_MISMATCH = Answer(
    403,
    b"the VAPID credentials in the authorization header do not correspond to the credentials used to create the "
    b"subscriptions.\n",
)


def decode_base64url(text: str) -> bytes:
    """Without padding."""
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))


def encode_base64url(data: bytes) -> str:
    """Without padding."""
    return urlsafe_b64encode(data).rstrip(b"=").decode()


class UserAgent:
    """
    A browser, or an app with UnifiedPush.

    :param endpoint: of its subscription.
    :param server_key: public VAPID key that it subscribed with.
    :ivar messages: what it received and decrypted.
    """

    def __init__(self, endpoint: str, server_key: str) -> None:
        self._private = ec.generate_private_key(ec.SECP256R1())
        self._secret = secrets.token_bytes(16)
        self.endpoint = endpoint
        self.server_key = server_key
        self.messages: list[bytes] = []

    @property
    def device(self) -> WebPushDevice:
        """Its registration."""
        point = self._private.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)
        return WebPushDevice(self.endpoint, encode_base64url(point), encode_base64url(self._secret))

    @property
    def subscription(self) -> dict[str, Any]:
        """As `PushSubscription.toJSON()`."""
        device = self.device
        keys = {"p256dh": device.p256dh, "auth": device.auth}
        return {"endpoint": device.endpoint, "expirationTime": None, "keys": keys}

    def receive(self, body: bytes) -> None:
        """
        Decrypt a message.

        :raise http_ece.ECEException: it is not for this subscription.
        """
        self.messages.append(
            http_ece.decrypt(body, private_key=self._private, auth_secret=self._secret, version="aes128gcm")
        )


class WebPushServer(ScriptedServer):
    """
    A push service, which delivers at once.

    :ivar agents: user agents by path of their endpoint.
    :ivar on_message: called with the path and the message after each delivery.
    """

    def __init__(self, certificate: Path | None = None) -> None:
        super().__init__(certificate)
        self.agents: dict[str, UserAgent] = {}
        self.gone: set[str] = set()
        self.on_message: Callable[[str, bytes], None] = lambda path, message: None

    def subscribe(self, server_key: str) -> UserAgent:
        """A new subscription, for messages of the server with this public key only."""
        path = f"/push/{secrets.token_urlsafe(24)}"
        agent = self.agents[path] = UserAgent(self.url + path, server_key)
        return agent

    def unsubscribe(self, agent: UserAgent) -> None:
        """End a subscription."""
        path = urlsplit(agent.endpoint).path
        del self.agents[path]
        self.gone.add(path)

    def answer(self, request: ReceivedRequest) -> Answer:
        """Check and deliver a message."""
        agent = self.agents.get(request.path)
        if request.path in self.gone:
            return Answer(410)
        if agent is None:
            return Answer(404)
        refusal = self._check_headers(request) or self._check_vapid(request, agent)
        if refusal is not None:
            return refusal
        if len(request.body) > MAX_BODY_BYTES:
            return Answer(413)
        try:
            agent.receive(request.body)
        except http_ece.ECEException:
            return Answer(400, b"cannot be decrypted")
        self.on_message(request.path, agent.messages[-1])
        return Answer(201, headers={"Location": f"{self.url}/message/{len(self.received)}"})

    def _check_headers(self, request: ReceivedRequest) -> Answer | None:
        headers = request.headers
        if request.method != "POST" or not headers.get("ttl", "").isdigit():
            return Answer(400, b"TTL")
        if headers.get("content-encoding") != "aes128gcm":
            return Answer(415)
        if headers.get("urgency", "normal") not in _URGENCIES:
            return Answer(400, b"Urgency")
        if "topic" in headers and not _TOPIC.fullmatch(headers["topic"]):
            return Answer(400, b"Topic")
        return None

    def _check_vapid(self, request: ReceivedRequest, agent: UserAgent) -> Answer | None:
        parts = _AUTHORIZATION.fullmatch(request.headers.get("authorization", ""))
        if parts is None:
            return Answer(401)
        if parts[2] != agent.server_key:
            return KEY_MISMATCH
        try:
            claims = verify_vapid_token(parts[1], parts[2])
        except (JWException, ValueError):
            return Answer(403, b"signature")
        if claims.get("aud") != self.url or not 0 < claims["exp"] - time() <= MAX_TOKEN_SECONDS:
            return Answer(403, b"claims")
        if not str(claims.get("sub")).startswith(("mailto:", "https:")):
            return Answer(403, b"contact")
        return None


def verify_vapid_token(token: str, server_key: str) -> dict[str, Any]:
    """The claims of a token that was signed with a key, by jwcrypto; whoever calls checks them."""
    point = decode_base64url(server_key)
    x, y = encode_base64url(point[1:33]), encode_base64url(point[33:])
    key = JWK(kty="EC", crv="P-256", x=x, y=y)
    verified = JWT(check_claims={"exp": None, "aud": None}, algs=["ES256"])
    verified.deserialize(token, key)
    claims: dict[str, Any] = json.loads(verified.claims)
    return claims
