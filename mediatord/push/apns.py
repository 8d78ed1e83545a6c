"""
Apple Push Notification service: provider API over HTTP/2, authenticated by a signed token (Apple, "Sending
notification requests to APNs" and "Handling notification responses from APNs").
"""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import orjson
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from pybase64 import urlsafe_b64encode
from twisted.logger import Logger

from mediatord.errors import OperatorError
from mediatord.net.http2_client import HTTP2Client
from mediatord.net.http2_connection import HTTP2Response
from mediatord.net.outbound_http import OutboundAddressError, OutboundError, OutboundHTTPClient
from mediatord.push.devices import APNsDevice, ServiceName
from mediatord.push.service import REQUEST_TIMEOUT, PushAlert, PushOutcome, PushResult, Wakeup, make_aps
from mediatord.runtime.failure_logging import LogThrottle
from mediatord.runtime.secret_files import read_secret_file

_log = Logger()

# Apple refuses tokens of more than 60 minutes, and new ones within 20 minutes.
_TOKEN_SECONDS = 3000.0
_MIN_TOKEN_SECONDS = 1230.0
# Until the next attempt where only the operator, or the time, can help.
_CREDENTIALS_PAUSE = 600.0
# How long APNs keeps a notification for a device that cannot be reached.
_LIFETIME = 86_400
_MAX_PAYLOAD_BYTES = 4096
_COLLAPSE_ID = re.compile(r"[!-~]{1,64}")
_COORDINATE_BYTES = 32

_ID = re.compile(r"[A-Z0-9]{10}")
_TOPIC = re.compile(r"[A-Za-z0-9.-]{1,255}")
_DEVICE_TOKEN = re.compile(r"(?:[0-9A-Fa-f]{2}){1,100}")
_DIGITS = re.compile(r"[0-9]{1,6}")

_GONE = frozenset(("Unregistered", "ExpiredToken", "BadDeviceToken", "DeviceTokenNotForTopic"))
_BAD_KEY = frozenset(("InvalidProviderToken", "BadEnvironmentKeyIdInToken", "UnrelatedKeyIdInToken"))
_EXPIRED = "ExpiredProviderToken"
_RETRY = frozenset((_EXPIRED, "IdleTimeout", "TooManyProviderTokenUpdates", "TooManyRequests", *_BAD_KEY))
# Others of Apple's table of error strings.
_REJECTED = frozenset(
    (
        "BadCertificate",
        "BadCertificateEnvironment",
        "BadCollapseId",
        "BadExpirationDate",
        "BadMessageId",
        "BadPath",
        "BadPriority",
        "BadTopic",
        "DuplicateHeaders",
        "Forbidden",
        "InvalidPushType",
        "MethodNotAllowed",
        "MissingDeviceToken",
        "MissingProviderToken",
        "MissingTopic",
        "PayloadEmpty",
        "PayloadTooLarge",
        "TopicDisallowed",
    )
)
_OF_SERVER = frozenset(("InternalServerError", "ServiceUnavailable", "Shutdown"))
_DOCUMENTED = _GONE | _RETRY | _REJECTED | _OF_SERVER

_OK = 200
_UNREGISTERED = 410
_TOO_MANY_REQUESTS = 429
_SERVER_ERROR = 500


class APNsConfigurationError(OperatorError):
    """The key of APNs, or what goes with it, cannot be used."""


class APNsCredentials(NamedTuple):
    """
    The signing key of a developer team, and the app that it is used for.

    :param topic: bundle id of the app.
    """

    private_key: ec.EllipticCurvePrivateKey
    key_id: str
    team_id: str
    topic: str


def load_apns_credentials(path: Path, key_id: str, team_id: str, topic: str) -> APNsCredentials:
    """
    Read the key file that Apple issued, and check what goes with it; sends nothing.

    :raise OperatorError: the file cannot be read, or is no such key, or another value is invalid; in one line.
    """
    if not _TOPIC.fullmatch(topic):
        raise APNsConfigurationError("push.apns.topic: expected the bundle id of an app")
    for name, value in (("key_id", key_id), ("team_id", team_id)):
        if not _ID.fullmatch(value):
            raise APNsConfigurationError(f"push.apns.{name}: expected 10 capital letters and digits")
    try:
        key = load_pem_private_key(read_secret_file(path), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it is encrypted
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise APNsConfigurationError(f"{path} is not a signing key of APNs (.p8: PEM, not encrypted, P-256)")
    return APNsCredentials(key, key_id, team_id, topic)


class ProviderToken:
    """
    The token (JWT, ES256) that authenticates all requests.

    :param clock: an IReactorTime.
    """

    def __init__(self, credentials: APNsCredentials, clock: Any) -> None:
        self._credentials = credentials
        self._clock = clock
        self._issued = 0.0
        self._token: str | None = None

    def get(self) -> str:
        """The token, renewed if it is old."""
        if self._token is None or self._age() >= _TOKEN_SECONDS:
            self._token = self._issue()
        return self._token

    def replace(self, expired: str) -> float:
        """
        Replace a token that APNs calls expired, unless that was done already, or it is too early.

        :return: seconds until that may be done; 0 if there is another token now.
        """
        if self._token is not None and hmac.compare_digest(self._token, expired):
            left = _MIN_TOKEN_SECONDS - self._age()
            if left > 0:
                return left
            self._token = self._issue()
        return 0.0

    def _age(self) -> float:
        # If the clock was set back, the token is as unacceptable as an old one.
        return abs(float(self._clock.seconds()) - self._issued)

    def _issue(self) -> str:
        self._issued = float(self._clock.seconds())
        header = {"alg": "ES256", "kid": self._credentials.key_id, "typ": "JWT"}
        claims = {"iss": self._credentials.team_id, "iat": int(self._issued)}
        signed = f"{_encode(orjson.dumps(header))}.{_encode(orjson.dumps(claims))}"
        numbers = decode_dss_signature(self._credentials.private_key.sign(signed.encode(), ec.ECDSA(SHA256())))
        signature = b"".join(number.to_bytes(_COORDINATE_BYTES) for number in numbers)
        return f"{signed}.{_encode(signature)}"


def _encode(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


class APNsService:
    """
    The service (an :class:`~mediatord.push.service.IPushService`). Everything goes over one connection.

    :param outbound: checks the address of `url`, which is usually public.
    :param url: base URL, https.
    :param alert: shown by the device if it has text; else the app is woken in the background.
    :raise OperatorError: an invalid URL.
    """

    def __init__(
        self, outbound: OutboundHTTPClient, credentials: APNsCredentials, url: str, alert: PushAlert | None = None
    ) -> None:
        try:
            self._client = HTTP2Client(outbound, url)
        except OutboundAddressError:
            raise APNsConfigurationError("push.apns.url: expected an https:// URL") from None
        base = urlsplit(url)
        self._host = base.hostname or ""
        self._path = base.path.rstrip("/") + "/3/device/"
        self._clock = outbound.reactor
        self._token = ProviderToken(credentials, self._clock)
        self._topic = credentials.topic
        self._aps = make_aps(alert)
        self._push_type, self._priority = ("alert", "10") if alert else ("background", "5")
        self._throttle = LogThrottle(self._clock)

    @property
    def name(self) -> ServiceName:
        """Its name in configuration, metrics and log."""
        return "apns"

    def host_of(self, device: APNsDevice) -> str:
        """The host of the URL, for all devices."""
        return self._host

    async def send(self, device: APNsDevice, wakeup: Wakeup) -> PushResult:
        """Send one request; with a renewed token once more, if the first one had expired."""
        if not _DEVICE_TOKEN.fullmatch(device.token):
            return PushResult("gone", "BadDeviceToken")
        deadline = self._clock.seconds() + REQUEST_TIMEOUT
        token = self._token.get()
        result = await self._post(device, wakeup, token, deadline)
        if result.reason != _EXPIRED:
            return result
        wait = self._token.replace(token)
        if wait:
            self._warn("the token within 20 minutes; is the clock right?")
            return result._replace(retry_after=wait)
        return await self._post(device, wakeup, self._token.get(), deadline)

    async def close(self) -> None:
        """Abort what is in progress, and close connections."""
        await self._client.close()

    async def _post(self, device: APNsDevice, wakeup: Wakeup, token: str, deadline: float) -> PushResult:
        now = self._clock.seconds()
        headers = [
            ("authorization", f"bearer {token}"),
            ("apns-topic", self._topic),
            ("apns-push-type", self._push_type),
            ("apns-priority", self._priority),
            ("apns-expiration", str(int(now) + _LIFETIME)),
            ("apns-collapse-id", _make_collapse_id(wakeup.mediator)),
            ("content-type", "application/json"),
        ]
        path = self._path + device.token
        try:
            response = await self._client.post(
                path, headers, self._make_body(wakeup), timeout=max(0.0, deadline - now)
            )
        except OutboundError as error:
            return PushResult("retry", error.reason)
        result = _read_response(response)
        if result.reason in _BAD_KEY:
            self._warn("the signing key; check push.apns.key_file, key_id, team_id and url")
        return result

    def _make_body(self, wakeup: Wakeup) -> bytes:
        """The notification; without some of the ids if it would be too long."""
        content: dict[str, object] = {"aps": self._aps, "mediator": wakeup.mediator}
        ids = list(wakeup.message_ids)
        while ids:
            body = orjson.dumps(content | {"message_ids": ids})
            if len(body) <= _MAX_PAYLOAD_BYTES:
                return body
            ids.pop()
        return orjson.dumps(content)

    def _warn(self, refused: str) -> None:
        count = self._throttle.count_occurrence()
        if count:
            _log.warn("APNs refuses {refused} ({count} since the last warning)", refused=refused, count=count)


def _make_collapse_id(mediator: str) -> str:
    if _COLLAPSE_ID.fullmatch(mediator):
        return mediator
    return hashlib.sha256(mediator.encode()).hexdigest()


def _read_response(response: HTTP2Response) -> PushResult:
    status = response.status
    reason = "" if status == _OK else _read_reason(response.body)
    retry_after = _read_retry_after(response)
    if reason in _BAD_KEY or reason == "TooManyProviderTokenUpdates":
        retry_after = max(_CREDENTIALS_PAUSE, retry_after or 0.0)
    return PushResult(_judge(status, reason), reason, status, retry_after)


def _judge(status: int, reason: str) -> PushOutcome:
    if status == _OK:
        return "sent"
    if status == _UNREGISTERED or reason in _GONE:
        return "gone"
    if status == _TOO_MANY_REQUESTS or status >= _SERVER_ERROR or reason in _RETRY:
        return "retry"
    return "rejected"


def _read_reason(body: bytes) -> str:
    """The reason, if it is one that Apple documents."""
    try:
        reason = orjson.loads(body)["reason"]
    except (ValueError, TypeError, KeyError):
        return ""
    return reason if isinstance(reason, str) and reason in _DOCUMENTED else ""


def _read_retry_after(response: HTTP2Response) -> float | None:
    text = response.headers.get("retry-after", "")
    return float(text) if _DIGITS.fullmatch(text) else None
