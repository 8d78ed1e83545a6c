"""
The webhook: tells an endpoint of the operator which accounts have messages waiting.

Each notification is a POST of JSON, with the account as configured (its DID, or a pseudonym), and the number and
bytes of the messages that wait for it; never more:

.. code-block:: http

   POST /woken HTTP/1.1
   Content-Type: application/json
   Mediator-Timestamp: 1764280800
   Mediator-Signature: v1=6f0a…

   {"account":"did:peer:2…","messages":3,"bytes":5120}

The signature is the HMAC-SHA256, in hexadecimal digits, of the timestamp, a dot and the body, with the content of
`push.webhook.secret_file` as key. A receiver compares it in constant time, refuses timestamps (seconds since the
epoch) that are minutes old, and answers with any status from 200 to 299. A notification may come twice.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from pathlib import Path

import orjson

from mediatord.net.outbound_http import OutboundError, OutboundHTTPClient
from mediatord.push.service import REQUEST_TIMEOUT, PushResult
from mediatord.runtime.secret_files import SecretFileError, read_secret_file

MIN_SECRET_BYTES = 32
_SUCCESS, _REDIRECT = 200, 300


def load_webhook_secret(path: Path) -> bytes:
    """
    Read the key of the signature; white space at its ends does not count.

    :raise SecretFileError: it is unreadable, accessible to others, or too short.
    """
    secret = read_secret_file(path).strip()
    if len(secret) < MIN_SECRET_BYTES:
        raise SecretFileError(f"{path}: expected at least {MIN_SECRET_BYTES} bytes, as the key of a signature")
    return secret


def sign_notification(secret: bytes, timestamp: str, body: bytes) -> str:
    """The value of Mediator-Signature."""
    return "v1=" + hmac.digest(secret, timestamp.encode("ascii") + b"." + body, "sha256").hex()


class WebhookNotifier:
    """
    Sends notifications.

    :param name_account: returns how the receiver knows an account, given its DID.
    """

    def __init__(
        self, url: str, secret: bytes, client: OutboundHTTPClient, name_account: Callable[[str], str]
    ) -> None:
        self._url = url
        self._secret = secret
        self._client = client
        self._name_account = name_account

    async def notify(self, account: str, messages: int, bytes: int) -> PushResult:
        """
        Send one notification. Never fails.

        :param account: its DID.
        :param messages: number of messages waiting.
        :param bytes: of their payloads.
        """
        body = orjson.dumps({"account": self._name_account(account), "messages": messages, "bytes": bytes})
        timestamp = str(int(self._client.reactor.seconds()))
        headers = {
            b"Mediator-Timestamp": timestamp.encode("ascii"),
            b"Mediator-Signature": sign_notification(self._secret, timestamp, body).encode("ascii"),
        }
        try:
            response = await self._client.post(
                self._url,
                body,
                b"application/json",
                timeout=REQUEST_TIMEOUT,
                headers=headers,
                redirects=False,
                secure=True,
            )
        except OutboundError as error:
            return PushResult("retry", error.reason)
        status = response.status
        if _SUCCESS <= status < _REDIRECT:
            return PushResult("sent", "", status)
        return PushResult("retry", "refused", status, response.retry_after)

    async def close(self) -> None:
        """Abort what is in progress, and close connections."""
        await self._client.close()
