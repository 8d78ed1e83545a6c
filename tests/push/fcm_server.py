"""
Firebase Cloud Messaging as its documentation describes it: token endpoint and HTTP v1 API, on one server.

Access tokens are issued for assertions that google-auth verifies; messages are checked, and answered by the state of
their registration token.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import orjson
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from google.auth import jwt

from tests.push.scripted_server import Answer, ReceivedRequest, ScriptedServer

PROJECT = "wallet-project"
EMAIL = "sender@wallet-project.iam.gserviceaccount.com"
SCOPE = "https://www.googleapis.com/auth/firebase.messaging"
GRANT_TYPE = "urn:ietf:params:oauth:grant-type:jwt-bearer"
TOKEN_PATH, SEND_PATH = "/token", f"/v1/projects/{PROJECT}/messages:send"
MAX_MESSAGE_BYTES = 4096
MAX_CLOCK_SKEW = 60
_FCM_ERROR = "type.googleapis.com/google.firebase.fcm.v1.FcmError"
_BAD_REQUEST = "type.googleapis.com/google.rpc.BadRequest"


def fcm_error(status: int, rpc: str, code: str = "", field: str = "", text: str = "failed", **headers: str) -> Answer:
    """
    An error as FCM sends it.

    :param rpc: status of the API.
    :param code: error code of FCM; empty if it does not come from FCM.
    :param field: field that is invalid.
    """
    details: list[dict[str, Any]] = []
    if code:
        details.append({"@type": _FCM_ERROR, "errorCode": code})
    if field:
        details.append({"@type": _BAD_REQUEST, "fieldViolations": [{"field": field, "description": text}]})
    error = {"code": status, "message": text, "status": rpc, "details": details}
    return Answer.of_json(status, {"error": error}, **headers)


UNREGISTERED = fcm_error(404, "NOT_FOUND", "UNREGISTERED", text="Requested entity was not found.")
SENDER_ID_MISMATCH = fcm_error(403, "PERMISSION_DENIED", "SENDER_ID_MISMATCH", text="SenderId mismatch")
INVALID_TOKEN = fcm_error(400, "INVALID_ARGUMENT", "INVALID_ARGUMENT", "message.token", "Invalid registration token")
# As the documentation shows it, without violations.
INVALID_TOKEN_TEXT = fcm_error(
    400, "INVALID_ARGUMENT", "INVALID_ARGUMENT", text="The registration token is not a valid FCM registration token"
)
INVALID_ARGUMENT = fcm_error(400, "INVALID_ARGUMENT", "", "message.data[0].value", "Invalid value")
QUOTA_EXCEEDED = fcm_error(429, "RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED", text="Quota exceeded")
UNAVAILABLE = fcm_error(503, "UNAVAILABLE", "UNAVAILABLE", text="The service is unavailable.", Retry_After="7")
INTERNAL = fcm_error(500, "INTERNAL", "INTERNAL", text="Internal error encountered.")
THIRD_PARTY_AUTH_ERROR = fcm_error(401, "UNAUTHENTICATED", "THIRD_PARTY_AUTH_ERROR", text="Auth error from APNS")
UNAUTHENTICATED = fcm_error(401, "UNAUTHENTICATED", text="Request had invalid authentication credentials.")
PERMISSION_DENIED = fcm_error(403, "PERMISSION_DENIED", text="Cloud Messaging API has not been used in project.")


class FCMServer(ScriptedServer):
    """
    FCM. `received` and `script` concern messages.

    :ivar tokens: the token endpoint, which has its own address, requests and script.
    :ivar unregistered: registration tokens of devices that are gone.
    :ivar refused: access tokens that are accepted no longer.
    :ivar delivered: messages that were accepted.
    """

    def __init__(self, certificate: Path | None = None) -> None:
        super().__init__(certificate)
        self.tokens = TokenServer(certificate)
        self.unregistered: set[str] = set()
        self.refused: set[str] = set()
        self.delivered: list[dict[str, Any]] = []

    def start(self, reactor: Any, port: int = 0) -> None:
        super().start(reactor, port)
        self.tokens.start(reactor)

    async def stop(self) -> None:
        await self.tokens.stop()
        await super().stop()

    def write_credentials(self, path: Path) -> Path:
        """The key file of a service account that may send; return its path."""
        path.touch(0o600)
        path.write_bytes(orjson.dumps(self.tokens.credentials))
        return path

    def answer(self, request: ReceivedRequest) -> Answer:
        """Check a message as FCM does."""
        if (request.method, request.path) != ("POST", SEND_PATH):
            return fcm_error(404, "NOT_FOUND")
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme != "Bearer" or token not in self.tokens.issued or token in self.refused:
            return UNAUTHENTICATED
        message = request.json["message"]
        if len(request.body) > MAX_MESSAGE_BYTES:
            return fcm_error(400, "INVALID_ARGUMENT", "INVALID_ARGUMENT", text="Message is too big")
        if not all(isinstance(value, str) for value in message.get("data", {}).values()):
            return INVALID_ARGUMENT
        if message["token"] in self.unregistered:
            return UNREGISTERED
        self.delivered.append(message)
        return Answer.of_json(200, {"name": f"projects/{PROJECT}/messages/{len(self.delivered)}"})


class TokenServer(ScriptedServer):
    """
    Token endpoint of Google's authorization server.

    :ivar issued: access tokens.
    :ivar lifetime: of the next ones, in seconds.
    :ivar credentials: content of the key file of the service account.
    """

    def __init__(self, certificate: Path | None = None) -> None:
        super().__init__(certificate)
        key = rsa.generate_private_key(65_537, 2048)
        self._public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        self._private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
        self._numbers = count(1)
        self.issued: list[str] = []
        self.lifetime = 3599

    @property
    def credentials(self) -> dict[str, str]:
        """Content of the key file."""
        return {
            "type": "service_account",
            "project_id": PROJECT,
            "private_key_id": "key-1",
            "private_key": self._private,
            "client_email": EMAIL,
            "token_uri": self.url + TOKEN_PATH,
        }

    def answer(self, request: ReceivedRequest) -> Answer:
        """Issue an access token, if google-auth accepts the assertion."""
        form = parse_qs(request.body.decode())
        if request.path != TOKEN_PATH or form.get("grant_type") != [GRANT_TYPE]:
            return Answer.of_json(400, {"error": "unsupported_grant_type"})
        try:
            claims: Any = jwt.decode(
                form["assertion"][0],
                certs=self._public,
                audience=self.url + TOKEN_PATH,
                clock_skew_in_seconds=MAX_CLOCK_SKEW,
            )
        except ValueError as error:
            return Answer.of_json(400, {"error": "invalid_grant", "error_description": str(error)})
        if claims["iss"] != EMAIL or claims["scope"] != SCOPE or claims["exp"] - claims["iat"] > 3600:
            return Answer.of_json(400, {"error": "invalid_grant"})
        token = f"ya29.access-{next(self._numbers)}"
        self.issued.append(token)
        return Answer.of_json(200, {"access_token": token, "expires_in": self.lifetime, "token_type": "Bearer"})
