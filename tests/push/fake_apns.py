"""
The Apple Push Notification service, made from its documentation ("Sending notification requests to APNs",
"Establishing a token-based connection to APNs", "Handling notification responses from APNs"). Also a process of its
own:

    python -m tests.push.fake_apns --certificate SERVER.pem --key KEY.pem --team TEAM --key-id ID --topic TOPIC

writes its port, then each notification as a line of JSON.
"""

from __future__ import annotations

import json
import re
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jwcrypto.common import JWException
from jwcrypto.jwk import JWK
from jwcrypto.jws import JWS

from tests.net.http2_server import Action, ReceivedRequest, ScriptedServer

_PATH = re.compile(r"/3/device/((?:[0-9a-fA-F]{2})+)")
_MAX_TOKEN_AGE = 3600.0
_MIN_UPDATE_INTERVAL = 1200.0
_MAX_PAYLOAD_BYTES = 4096
_MAX_COLLAPSE_ID_BYTES = 64
# Priority that each type of notification must or may have.
_PRIORITIES = {"background": {"5"}, "alert": {"1", "5", "10"}}


@dataclass(frozen=True)
class Notification:
    """A notification that was accepted."""

    device_token: str
    headers: dict[str, str]
    payload: dict[str, Any]


class Refusal(Exception):
    """An answer from the table of error strings."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


def answer(status: int, reason: str, **headers: str) -> Action:
    """Answer with an error; underscores in names of headers are hyphens."""
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda request: request.respond(status, fields, json.dumps({"reason": reason}).encode())


class FakeAPNs:
    """
    The service. It checks requests as Apple does, unless :attr:`server` has something else in its script.

    :param key: the public key that belongs to the team's key, PEM.
    :param seconds: the time.
    :ivar notifications: those that were accepted.
    :ivar tokens: authentication tokens that were seen, in order.
    :ivar unregistered: device tokens that are no longer active.
    """

    def __init__(self, key: bytes, *, team: str, key_id: str, topic: str, seconds: Callable[[], float]) -> None:
        self.server = ScriptedServer(default=self.process)
        self.notifications: list[Notification] = []
        self.tokens: list[str] = []
        self.unregistered: set[str] = set()
        self.on_notification: Callable[[Notification], None] = self.notifications.append
        self._key = JWK.from_pem(key)
        self._team = team
        self._key_id = key_id
        self._topic = topic
        self._seconds = seconds
        self._updated = 0.0

    def process(self, request: ReceivedRequest) -> None:
        """Check a request, accept its notification, and answer."""
        try:
            notification = self._check(request)
        except Refusal as refusal:
            answer(refusal.status, refusal.reason)(request)
        else:
            self.on_notification(notification)
            request.respond(200, {"apns-id": "EC1BF194-B3B2-424A-89A9-5A918A6E6B5D"})

    def _check(self, request: ReceivedRequest) -> Notification:
        if request.headers[":method"] != "POST":
            raise Refusal(405, "MethodNotAllowed")
        path = _PATH.fullmatch(request.path)
        if path is None:
            raise Refusal(404, "BadPath")
        self._check_token(request.headers.get("authorization", ""))
        self._check_headers(request.headers)
        device_token = path.group(1)
        if device_token in self.unregistered:
            raise Refusal(410, "Unregistered")
        return Notification(device_token, request.headers, self._check_payload(request))

    def _check_token(self, authorization: str) -> None:
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Refusal(403, "MissingProviderToken")
        signed = JWS()
        signed.allowed_algs = ["ES256"]
        try:
            signed.deserialize(token, self._key)
        except JWException:
            raise Refusal(403, "InvalidProviderToken") from None
        claims = json.loads(signed.payload)
        if (
            signed.jose_header.get("kid") != self._key_id
            or set(claims) != {"iss", "iat"}
            or claims["iss"] != self._team
        ):
            raise Refusal(403, "InvalidProviderToken")
        if abs(self._seconds() - claims["iat"]) >= _MAX_TOKEN_AGE:
            raise Refusal(403, "ExpiredProviderToken")
        self._check_update(token)

    def _check_update(self, token: str) -> None:
        if token in self.tokens:
            return
        if self.tokens and self._seconds() - self._updated < _MIN_UPDATE_INTERVAL:
            raise Refusal(429, "TooManyProviderTokenUpdates")
        self.tokens.append(token)
        self._updated = self._seconds()

    def _check_headers(self, headers: dict[str, str]) -> None:
        if not headers.get("apns-topic"):
            raise Refusal(400, "MissingTopic")
        if headers["apns-topic"] != self._topic:
            raise Refusal(400, "DeviceTokenNotForTopic")
        if headers.get("apns-push-type") not in _PRIORITIES:
            raise Refusal(400, "InvalidPushType")
        if headers.get("apns-priority", "10") not in _PRIORITIES[headers["apns-push-type"]]:
            raise Refusal(400, "BadPriority")
        if not headers.get("apns-expiration", "0").isdigit():
            raise Refusal(400, "BadExpirationDate")
        if len(headers.get("apns-collapse-id", "").encode()) > _MAX_COLLAPSE_ID_BYTES:
            raise Refusal(400, "BadCollapseId")

    def _check_payload(self, request: ReceivedRequest) -> dict[str, Any]:
        if len(request.body) > _MAX_PAYLOAD_BYTES:
            raise Refusal(413, "PayloadTooLarge")
        try:
            payload = json.loads(request.body)
        except ValueError:
            payload = None
        if not isinstance(payload, dict) or not isinstance(payload.get("aps"), dict):
            raise Refusal(400, "PayloadEmpty")
        return payload


def main() -> None:
    """Run as a process of its own until it is ended."""
    from twisted.internet import reactor  # noqa: TID251  this is its process

    parser = ArgumentParser()
    for name in ("certificate", "key", "team", "key-id", "topic"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    seconds: Callable[[], float] = reactor.seconds
    key = Path(options.key).read_bytes()
    fake = FakeAPNs(key, team=options.team, key_id=options.key_id, topic=options.topic, seconds=seconds)
    fake.on_notification = lambda one: _write({"token": one.device_token, "payload": one.payload})
    port = fake.server.listen(reactor, Path(options.certificate), port=options.port)
    _write({"port": port.getHost().port})
    reactor.run()


def _write(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
