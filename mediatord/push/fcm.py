"""
Firebase Cloud Messaging, HTTP v1 API: https://firebase.google.com/docs/reference/fcm/rest/v1/projects.messages.

Requests are authenticated with an access token, which the service account's key obtains (RFC 7523).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard
from urllib.parse import quote, urlencode

import orjson
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from google.auth import jwt
from google.auth.crypt import RSASigner
from twisted.internet.defer import Deferred
from twisted.internet.defer import TimeoutError as DeferredTimeoutError
from twisted.logger import Logger

from mediatord.errors import StartupError
from mediatord.net.outbound_http import (
    OutboundAddressError,
    OutboundError,
    OutboundHTTPClient,
    OutboundResponse,
    get_origin,
)
from mediatord.push.devices import FCMDevice, ServiceName
from mediatord.push.service import REQUEST_TIMEOUT, PushAlert, PushResult, Wakeup, make_aps
from mediatord.runtime.failure_logging import redact_failure
from mediatord.runtime.secret_files import SecretFileError, read_secret_file

_log = Logger()

_SCOPE = "https://www.googleapis.com/auth/firebase.messaging"
_GRANT_TYPE = "urn:ietf:params:oauth:grant-type:jwt-bearer"
_FORM, _JSON = b"application/x-www-form-urlencoded", b"application/json"
_CREDENTIAL_FIELDS = ("project_id", "client_email", "private_key", "token_uri")
_ASSERTION_SECONDS = 3600
# An access token is renewed this long before its end, and one that is refused not more often.
_RENEWAL_MARGIN = 300.0
_MIN_RENEWAL_INTERVAL = 60.0
# Pause after the token endpoint has failed, doubled each time.
_FIRST_PAUSE, _MAX_PAUSE = 2.0, 60.0
_MAX_ACCESS_TOKEN = 8192
_MAX_BODY_BYTES = 4096
# How long FCM keeps a message for a device that is offline: the maximum.
_TTL_SECONDS = 2_419_200
# FCM asks for a minute where it does not say more.
_QUOTA_PAUSE = 60.0
# Codes of errors that the documentation lists: of FCM, and of the token endpoint (RFC 6749 5.2).
_FCM_CODES = frozenset(
    "UNSPECIFIED_ERROR INVALID_ARGUMENT UNREGISTERED SENDER_ID_MISMATCH QUOTA_EXCEEDED UNAVAILABLE INTERNAL "
    "THIRD_PARTY_AUTH_ERROR UNAUTHENTICATED PERMISSION_DENIED NOT_FOUND RESOURCE_EXHAUSTED".split()
)
_TOKEN_CODES = frozenset(
    "invalid_request invalid_client invalid_grant unauthorized_client unsupported_grant_type invalid_scope".split()
)
_OK, _BAD_REQUEST, _UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND, _TOO_MANY = 200, 400, 401, 403, 404, 429
_SERVER_ERROR = 500


@dataclass(frozen=True, slots=True)
class FCMCredentials:
    """
    The key of a service account.

    :param email: of the account.
    :param token_url: where access tokens are obtained.
    """

    project: str
    email: str
    token_url: str
    signer: RSASigner = field(repr=False)


def load_fcm_credentials(path: Path) -> FCMCredentials:
    """
    Read the key file of a service account, as Firebase issues it. Nothing is sent.

    :raise SecretFileError: it is unreadable, accessible to others, or not such a file.
    """
    try:
        content = orjson.loads(read_secret_file(path))
    except ValueError:
        raise SecretFileError(f"{path}: expected the JSON key file of a service account") from None
    if not isinstance(content, dict):
        raise SecretFileError(f"{path}: expected the JSON key file of a service account")
    for name in _CREDENTIAL_FIELDS:
        if not isinstance(content.get(name), str) or not content[name]:
            raise SecretFileError(f"{path}: {name} is missing; expected the key file of a service account")
    try:
        get_origin(content["token_uri"])
    except OutboundAddressError:
        raise SecretFileError(f"{path}: token_uri is not a URL") from None
    try:
        key = load_pem_private_key(content["private_key"].encode(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, RSAPrivateKey):  # google-auth does not check that
        raise SecretFileError(f"{path}: private_key is not an RSA key in PEM")
    signer = RSASigner.from_service_account_info(content)
    return FCMCredentials(content["project_id"], content["client_email"], content["token_uri"], signer)


@dataclass(frozen=True, slots=True)
class _AccessToken:
    value: str = field(repr=False)
    renew_at: float


class _TokenError(Exception):
    """There is no access token. :param result: what that means for a wake-up."""

    def __init__(self, result: PushResult) -> None:
        super().__init__(result.reason)
        self.result = result


class AccessTokenSource:
    """
    Obtains access tokens, with one request for all who wait. After a failure nobody asks for a while.

    :param client: sends the requests.
    """

    def __init__(self, credentials: FCMCredentials, client: OutboundHTTPClient) -> None:
        self._credentials = credentials
        self._client = client
        self._clock = client.reactor
        self._token: _AccessToken | None = None
        self._waiting: list[Deferred[_AccessToken]] = []
        self._is_fetching = False
        self._failure: PushResult | None = None
        self._paused_until = 0.0
        self._pause = _FIRST_PAUSE
        self._refused_at: float | None = None

    async def get(self, deadline: float) -> str:
        """
        A valid token.

        :param deadline: time until which to wait.
        :raise _TokenError: there is none.
        """
        now = self._clock.seconds()
        if self._token is not None and now < self._token.renew_at:
            return self._token.value
        if self._failure is not None and now < self._paused_until:
            raise _TokenError(self._failure._replace(retry_after=self._paused_until - now))
        waiting: Deferred[_AccessToken] = Deferred(self._forget_waiting)
        self._waiting.append(waiting)
        if not self._is_fetching:
            self._is_fetching = True
            Deferred.fromCoroutine(self._fetch())
        try:
            return (await waiting.addTimeout(max(0.0, deadline - now), self._clock)).value
        except DeferredTimeoutError:
            raise _TokenError(PushResult("retry", "token_timeout")) from None

    def refuse(self, value: str) -> bool:
        """
        Forget a token that the service does not accept, at most once a minute; return whether another can be had.
        """
        if self._token is None or self._token.value != value:
            return True  # it has been renewed
        now = self._clock.seconds()
        if self._refused_at is not None and 0 <= now - self._refused_at < _MIN_RENEWAL_INTERVAL:
            return False
        self._refused_at, self._token = now, None
        return True

    def _forget_waiting(self, waiting: Deferred[_AccessToken]) -> None:
        self._waiting.remove(waiting)

    async def _fetch(self) -> None:
        """Fetch a token for all who wait. Never fails."""
        result = PushResult("retry", "internal_error")
        token = None
        try:
            token = await self._request()
        except _TokenError as error:
            result = error.result
        except OutboundError as error:
            result = PushResult("retry", error.reason)
        except Exception:
            _log.failure("obtaining an access token of FCM failed", redact_failure())
        if token is not None:
            self._token, self._failure, self._pause = token, None, _FIRST_PAUSE
        else:
            pause = max(self._pause, result.retry_after or 0.0)
            result = result._replace(retry_after=pause)
            self._failure, self._paused_until = result, self._clock.seconds() + pause
            self._pause = min(2 * self._pause, _MAX_PAUSE)
        self._is_fetching = False
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if token is not None:
                one.callback(token)
            else:
                one.errback(_TokenError(result))

    async def _request(self) -> _AccessToken:
        now = self._clock.seconds()
        claims = {
            "iss": self._credentials.email,
            "scope": _SCOPE,
            "aud": self._credentials.token_url,
            "iat": int(now),
            "exp": int(now) + _ASSERTION_SECONDS,
        }
        assertion = jwt.encode(self._credentials.signer, claims)
        body = urlencode({"grant_type": _GRANT_TYPE, "assertion": assertion.decode()}).encode()
        response = await self._client.post(
            self._credentials.token_url, body, _FORM, timeout=REQUEST_TIMEOUT, redirects=False, secure=True
        )
        answer = _parse_object(response.body)
        if response.status != _OK:
            code = answer.get("error")
            reason = code if isinstance(code, str) and code in _TOKEN_CODES else "token_refused"
            raise _TokenError(PushResult("retry", reason, response.status, response.retry_after))
        token, lifetime = answer.get("access_token"), answer.get("expires_in")
        if not _is_header_token(token) or type(lifetime) is not int or lifetime <= 0:
            raise _TokenError(PushResult("retry", "token_invalid", response.status))
        return _AccessToken(token, now + max(lifetime - _RENEWAL_MARGIN, lifetime / 2))


def _is_header_token(value: object) -> TypeGuard[str]:
    """Whether a value can be sent in a header."""
    return (
        isinstance(value, str)
        and 0 < len(value) <= _MAX_ACCESS_TOKEN
        and value.isascii()
        and value.isprintable()
        and " " not in value
    )


class FCMService:
    """
    Sends wake-ups to FCM, which passes those for iOS on to APNs.

    :param client: keeps connections.
    :param url: base URL of the service.
    :param alert: visible notification; false for none.
    :raise StartupError: `url` is not one.
    """

    name: ServiceName = "fcm"

    def __init__(
        self,
        credentials: FCMCredentials,
        client: OutboundHTTPClient,
        *,
        url: str = "https://fcm.googleapis.com",
        alert: PushAlert | None = None,
    ) -> None:
        self._client = client
        self._url = f"{url.rstrip('/')}/v1/projects/{quote(credentials.project, safe='')}/messages:send"
        try:
            self._host = get_origin(url).partition("://")[2]
        except OutboundAddressError:
            raise StartupError("push.fcm.url: expected an https:// URL") from None
        self._tokens = AccessTokenSource(credentials, client)
        self._alert = alert or PushAlert()

    def host_of(self, device: FCMDevice) -> str:
        """The same for all devices."""
        return self._host

    async def send(self, device: FCMDevice, wakeup: Wakeup) -> PushResult:
        """Send one request, or two if the access token is refused."""
        clock = self._client.reactor
        deadline = clock.seconds() + REQUEST_TIMEOUT
        body = self._make_body(device, wakeup)
        if len(body) > _MAX_BODY_BYTES and wakeup.message_ids:
            body = self._make_body(device, Wakeup(wakeup.mediator))
        if len(body) > _MAX_BODY_BYTES:
            return PushResult("rejected", "too_large")
        try:
            token = await self._tokens.get(deadline)
            response = await self._post(body, token, deadline)
            if _is_token_refused(response) and self._tokens.refuse(token):
                token = await self._tokens.get(deadline)
                response = await self._post(body, token, deadline)
        except _TokenError as error:
            return error.result
        except OutboundError as error:
            return PushResult("retry", error.reason)
        return _judge(response)

    async def close(self) -> None:
        """Abort what is in progress, and close connections."""
        await self._client.close()

    async def _post(self, body: bytes, token: str, deadline: float) -> OutboundResponse:
        return await self._client.post(
            self._url,
            body,
            _JSON,
            timeout=deadline - self._client.reactor.seconds(),
            headers={b"Authorization": b"Bearer " + token.encode("ascii")},
            redirects=False,
            secure=True,
        )

    def _make_body(self, device: FCMDevice, wakeup: Wakeup) -> bytes:
        # Values of `data` are strings.
        data = {"mediator": wakeup.mediator}
        if wakeup.message_ids:
            data["message_ids"] = orjson.dumps(wakeup.message_ids).decode()
        message: dict[str, object] = {"token": device.token, "data": data}
        collapse = hashlib.sha256(wakeup.mediator.encode()).hexdigest()[:32]
        if device.platform.lower() == "ios":
            expiration = str(int(self._client.reactor.seconds()) + _TTL_SECONDS)
            message["apns"] = _make_apns(self._alert, collapse, expiration)
        else:
            message["android"] = _make_android(self._alert, collapse)
        return orjson.dumps({"message": message})


def _make_android(alert: PushAlert, collapse: str) -> dict[str, object]:
    android: dict[str, object] = {"priority": "HIGH", "collapse_key": collapse, "ttl": f"{_TTL_SECONDS}s"}
    if alert:
        texts = {
            "title_loc_key": alert.title_key,
            "body_loc_key": alert.body_key,
            "title": "" if alert.title_key else alert.title,
            "body": "" if alert.body_key else alert.body,
        }
        # The same tag replaces the notification before it.
        android["notification"] = {key: text for key, text in texts.items() if text} | {"tag": collapse}
    return android


def _make_apns(alert: PushAlert, collapse: str, expiration: str) -> dict[str, object]:
    headers = {
        "apns-push-type": "alert" if alert else "background",
        "apns-priority": "10" if alert else "5",
        "apns-collapse-id": collapse,
        "apns-expiration": expiration,
    }
    return {"headers": headers, "payload": {"aps": make_aps(alert)}}


@dataclass(frozen=True, slots=True)
class _FCMError:
    """
    An error response.

    :param code: the error code of FCM, else the status of the API; `unknown` if it is not documented.
    :param is_of_fcm: whether it is the former.
    :param names_token: whether the error is in the registration token.
    """

    code: str
    is_of_fcm: bool
    names_token: bool


def _parse_error(body: bytes) -> _FCMError:
    error = _parse_object(body).get("error")
    error = error if isinstance(error, dict) else {}
    details = error.get("details")
    details = [one for one in details if isinstance(one, dict)] if isinstance(details, list) else []
    codes = [code for one in details if isinstance(code := one.get("errorCode"), str) and code in _FCM_CODES]
    fields = [violation for one in details for violation in _list_violations(one)]
    status, text = error.get("status"), error.get("message")
    # Without violations, only the text distinguishes a malformed token from other arguments.
    names_token = "message.token" in fields or (
        not fields and bool(codes) and isinstance(text, str) and "registration token" in text
    )
    if codes:
        return _FCMError(codes[0], True, names_token)
    code = status if isinstance(status, str) and status in _FCM_CODES else "unknown"
    return _FCMError(code, False, names_token)


def _list_violations(detail: Mapping[str, Any]) -> list[str]:
    """Fields that a google.rpc.BadRequest names."""
    violations = detail.get("fieldViolations")
    if not isinstance(violations, list):
        return []
    return [field for one in violations if isinstance(one, dict) and isinstance(field := one.get("field"), str)]


def _parse_object(body: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _is_token_refused(response: OutboundResponse) -> bool:
    return response.status == _UNAUTHORIZED and _parse_error(response.body).code != "THIRD_PARTY_AUTH_ERROR"


def _judge(response: OutboundResponse) -> PushResult:
    """The outcome of a response (https://firebase.google.com/docs/cloud-messaging/error-codes)."""
    status, retry_after = response.status, response.retry_after
    if status == _OK:
        return PushResult("sent", "", status)
    error = _parse_error(response.body)
    if status == _NOT_FOUND and error.code == "UNREGISTERED":
        return PushResult("gone", error.code, status)
    if status == _BAD_REQUEST and error.code == "INVALID_ARGUMENT" and error.names_token:
        return PushResult("gone", error.code, status)
    if status == _FORBIDDEN and error.code == "SENDER_ID_MISMATCH":
        return PushResult("mismatch", error.code, status)
    if status == _TOO_MANY:
        return PushResult("retry", error.code, status, _QUOTA_PAUSE if retry_after is None else retry_after)
    if status >= _SERVER_ERROR:
        return PushResult("retry", error.code, status, retry_after)
    # The credentials, their permissions or the project are at fault, not the device.
    if status in (_UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND) and error.code != "THIRD_PARTY_AUTH_ERROR":
        return PushResult("retry", error.code, status, retry_after)
    return PushResult("rejected", error.code, status)
