"""
The secret that the nodes of a cluster share, and what is made from it.

How nodes know each other's requests and responses: HMAC-SHA256 with keys made from the cluster secret.

The seal of a request covers method, path, both boots, time, nonce and body; that of a response covers all that
identifies the request, the boot that answers, status and body. So neither can be altered, used for another node,
turned around, used a second time, or given as somebody else's.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from twisted.internet.interfaces import IReactorTime
from twisted.web.http_headers import Headers

from mediatord.private_file import PrivateFileError, read_private_file
from mediatord.store.interfaces.cluster import MAX_CLOCK_SKEW

MIN_SECRET_BYTES = 32
_KEY_SIZE = 32
_HKDF_PREFIX = b"mediatord cluster: "
_KEY_PURPOSES = (b"seal", b"requests", b"responses", b"allowances")


@dataclass(frozen=True, slots=True)
class ClusterKeys:
    """
    Keys that say nothing about each other, nor about the secret.

    :param seal: is shown to other nodes, who compare it with theirs; makes nothing.
    :param requests: authenticates requests.
    :param responses: authenticates responses.
    :param allowances: hides who is limited from who can read the store.
    """

    seal: bytes = field(repr=False)
    requests: bytes = field(repr=False)
    responses: bytes = field(repr=False)
    allowances: bytes = field(repr=False)


def read_cluster_keys(path: Path) -> ClusterKeys:
    """
    The keys made from the secret in a file; white space around it does not count.

    :raise PrivateFileError: it cannot be read, is open to others, or too short to be a secret.
    """
    secret = read_private_file(path).strip()
    if len(secret) < MIN_SECRET_BYTES:
        raise PrivateFileError(
            f"{path} holds less than {MIN_SECRET_BYTES} bytes; type: openssl rand -hex 32 > {path}"
        )
    return derive_cluster_keys(secret)


def derive_cluster_keys(secret: bytes) -> ClusterKeys:
    """The keys made from a secret, of at least :data:`LEAST` bytes."""
    return ClusterKeys(*(_derive_key(secret, purpose) for purpose in _KEY_PURPOSES))


def _derive_key(secret: bytes, purpose: bytes) -> bytes:
    return HKDF(SHA256(), _KEY_SIZE, salt=None, info=_HKDF_PREFIX + purpose).derive(secret)


# Seconds that the clocks of two nodes may be apart.
MAX_TIMESTAMP_SKEW = MAX_CLOCK_SKEW
MAX_NONCES = 100_000

SENDER_HEADER, RECEIVER_HEADER, TIME_HEADER, NONCE_HEADER, MAC_HEADER = (
    f"Mediatord-{name}" for name in ("Sender", "Receiver", "Time", "Nonce", "Seal")
)
AUTHENTICATION_HEADERS = SENDER_HEADER, RECEIVER_HEADER, TIME_HEADER, NONCE_HEADER, MAC_HEADER

_BOOT_PATTERN = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TIME_PATTERN = re.compile(r"[0-9]{1,15}")
_NONCE_PATTERN = re.compile(r"[0-9a-f]{32}")


class MessageAuthenticationError(Exception):
    """
    A request or response that no other node can have made for us, or not now.

    :ivar reason: one of a few words: `malformed`, `seal`, `time`, `replay`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class RequestId:
    """
    What identifies one request.

    :param sender: boot of the node that asks.
    :param receiver: boot of the node that is asked.
    :param time_ms: milliseconds since the epoch, by the clock of the sender.
    """

    sender: str
    receiver: str
    time_ms: int
    nonce: str


class MessageAuthenticator:
    """Seals what we send, and opens what others have sealed."""

    def __init__(
        self,
        clock: IReactorTime,
        keys: ClusterKeys,
        new_nonce: Callable[[], str] = lambda: secrets.token_hex(16),
        max_nonces: int = MAX_NONCES,
    ) -> None:
        self._clock = clock
        self._keys = keys
        self._new_nonce = new_nonce
        self._replays = ReplayCache(max_nonces)

    def request_id(self, sender: str, receiver: str) -> RequestId:
        """A fresh one."""
        return RequestId(sender, receiver, self._now_ms(), self._new_nonce())

    def authenticate_request(self, request_id: RequestId, method: str, path: str, body: bytes) -> dict[str, str]:
        """The headers that a request needs."""
        return {
            SENDER_HEADER: request_id.sender,
            RECEIVER_HEADER: request_id.receiver,
            TIME_HEADER: str(request_id.time_ms),
            NONCE_HEADER: request_id.nonce,
            MAC_HEADER: self._of_request(request_id, method, path, body),
        }

    def verify_request(self, headers: Mapping[str, str], method: str, path: str, body: bytes) -> RequestId:
        """
        The stamp of a request that a node made, for whichever receiver.

        :param headers: those that :meth:`seal_request` gives, as far as there are any.
        :raise NotSealed: it was not made by a node, not just now, or came before.
        """
        request_id = _parse_request_id(headers)
        _verify_mac(self._of_request(request_id, method, path, body), headers.get(MAC_HEADER, ""))
        now_ms = self._now_ms()
        if abs(now_ms - request_id.time_ms) > MAX_TIMESTAMP_SKEW * 1000:
            raise MessageAuthenticationError("time")
        if not self._replays.claim(request_id, now_ms):
            raise MessageAuthenticationError("replay")
        return request_id

    def authenticate_response(self, request_id: RequestId, sender: str, status: int, body: bytes) -> dict[str, str]:
        """
        The headers that the response to a request needs.

        :param sender: boot of the node that answers.
        """
        return {SENDER_HEADER: sender, MAC_HEADER: self._of_response(request_id, sender, status, body)}

    def verify_response(self, request_id: RequestId, headers: Mapping[str, str], status: int, body: bytes) -> str:
        """
        The boot of the node that gave this response to our request.

        :param headers: those that :meth:`seal_response` gives, as far as there are any.
        :raise NotSealed: none did.
        """
        sender = headers.get(SENDER_HEADER, "")
        if not _BOOT_PATTERN.fullmatch(sender):
            raise MessageAuthenticationError("malformed")
        _verify_mac(self._of_response(request_id, sender, status, body), headers.get(MAC_HEADER, ""))
        return sender

    def _of_request(self, request_id: RequestId, method: str, path: str, body: bytes) -> str:
        return _compute_mac(self._keys.requests, method, path, *_request_id_fields(request_id), body=body)

    def _of_response(self, request_id: RequestId, sender: str, status: int, body: bytes) -> str:
        return _compute_mac(self._keys.responses, str(status), sender, *_request_id_fields(request_id), body=body)

    def _now_ms(self) -> int:
        return int(self._clock.seconds() * 1000)


class ReplayCache:
    """
    The nonces of requests that were served, for as long as these could be sent again.

    Where there are too many, the oldest is forgotten and whatever was made up to its time is refused from then on.

    :param capacity: nonces that are remembered.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._seen: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._floor = -1

    def __len__(self) -> int:
        return len(self._seen)

    def claim(self, request_id: RequestId, now_ms: int) -> bool:
        """Whether a request is new; its time has to be within :data:`WINDOW`."""
        self._forget(now_ms)
        key = request_id.sender, request_id.nonce
        if key in self._seen or request_id.time_ms <= self._floor:
            return False
        self._seen[key] = request_id.time_ms
        if len(self._seen) > self._capacity:
            _, oldest = self._seen.popitem(last=False)
            self._floor = max(self._floor, oldest)
        return True

    def _forget(self, now_ms: int) -> None:
        while self._seen and next(iter(self._seen.values())) < now_ms - MAX_TIMESTAMP_SKEW * 1000:
            self._seen.popitem(last=False)


def extract_authentication_headers(headers: Headers) -> dict[str, str]:
    """Those headers of a request or response that concern seals, whatever bytes they have."""
    found = {name: headers.getRawHeaders(name.encode("ascii")) for name in AUTHENTICATION_HEADERS}
    return {name: values[-1].decode("latin-1") for name, values in found.items() if values}


def _parse_request_id(headers: Mapping[str, str]) -> RequestId:
    values = [headers.get(name, "") for name in (SENDER_HEADER, RECEIVER_HEADER, TIME_HEADER, NONCE_HEADER)]
    kinds = (_BOOT_PATTERN, _BOOT_PATTERN, _TIME_PATTERN, _NONCE_PATTERN)
    if not all(kind.fullmatch(value) for kind, value in zip(kinds, values, strict=True)):
        raise MessageAuthenticationError("malformed")
    sender, receiver, time_ms, nonce = values
    return RequestId(sender, receiver, int(time_ms), nonce)


def _verify_mac(ours: str, theirs: str) -> None:
    if not hmac.compare_digest(ours.encode(), theirs.encode()):
        raise MessageAuthenticationError("seal")


def _request_id_fields(request_id: RequestId) -> tuple[str, ...]:
    return request_id.sender, request_id.receiver, str(request_id.time_ms), request_id.nonce


def _compute_mac(key: bytes, *parts: str, body: bytes) -> str:
    """No two different lists of parts make the same text: each has its length before it."""
    encoded = [part.encode() for part in parts]
    text = b"".join(len(part).to_bytes(4, "big") + part for part in encoded) + sha256(body).digest()
    return hmac.digest(key, text, "sha256").hex()
