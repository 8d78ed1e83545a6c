"""
Protocol between nodes: JSON bodies of requests and responses, and their authentication.

Request: `{"protocol": 1, "hints": {"messages": [ids], "events": [ids], "contracts": [DIDs]}}`. Response:
`{"protocol": 1, "pushed": {...}}` with those that a socket took. Nodes of different versions run side by side: both
sides ignore unknown members and kinds, and a higher protocol number means nothing. The response to an unknown kind is
that none of it was pushed.

Both carry an HMAC-SHA256 with keys derived from the shared cluster secret. The MAC of a request covers method, path,
both boots, time, nonce and body; that of a response covers everything that identifies the request, the boot of the
responder, status and body. So neither can be altered, redirected to another node, reflected, replayed, or attributed
to another node.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Literal, get_args

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from twisted.internet.interfaces import IReactorTime
from twisted.web.http_headers import Headers

from mediatord.protocol import encoding
from mediatord.secret_files import SecretFileError, read_secret_file
from mediatord.store.interfaces.cluster import MAX_CLOCK_SKEW

PROTOCOL_VERSION = 1
NOTIFICATIONS_PATH = "/cluster/hints"
PROBE_PATH = "/cluster/probe"
MAX_BODY_BYTES = 65_536
# Notifications in one request.
MAX_NOTIFICATIONS = 1000
# Bytes of a body beside the names.
ENVELOPE_BYTES = 256

NotificationKind = Literal["messages", "events", "contracts"]
NOTIFICATION_KINDS: tuple[NotificationKind, ...] = get_args(NotificationKind)
NotificationNames = dict[NotificationKind, list[str]]


@dataclass(frozen=True, slots=True)
class PeerNotification:
    """
    Notice to a node with sockets of a DID: an item was stored, or the DID's contracts have changed.

    :param kind: DIDComm messages, pending Decentrl events, or changed contracts.
    :param name: id of the message or event, or the DID.
    :param did: the recipient, whose notifications arrive in order.
    :param payload_bytes: size of what the other node will read from the store.
    """

    kind: NotificationKind
    name: str
    did: str = field(default="", compare=False)
    payload_bytes: int = field(default=0, compare=False)

    @property
    def size(self) -> int:
        """Bytes in a body."""
        return len(encoding.dumps(self.name)) + 1


def encode_notifications(notifications: Iterable[PeerNotification]) -> bytes:
    """Encode the body of a request."""
    return _encode("hints", [(notification.kind, notification.name) for notification in notifications])


def decode_notifications(body: bytes) -> NotificationNames:
    """
    Decode the body of a request.

    :raise ValueError: it is malformed.
    """
    return _decode("hints", body)


def encode_push_result(pushed: NotificationNames) -> bytes:
    """Encode the body of a response."""
    return _encode("pushed", [(kind, name) for kind, names in pushed.items() for name in names])


def decode_push_result(body: bytes) -> frozenset[tuple[NotificationKind, str]]:
    """
    Decode the body of a response into kind and name of what was pushed.

    :raise ValueError: it is malformed.
    """
    return frozenset([(kind, name) for kind, names in _decode("pushed", body).items() for name in names])


def _encode(member: str, items: Iterable[tuple[NotificationKind, str]]) -> bytes:
    grouped: NotificationNames = {}
    for kind, name in items:
        grouped.setdefault(kind, []).append(name)
    return encoding.dumps({"protocol": PROTOCOL_VERSION, member: grouped})


def _decode(member: str, body: bytes) -> NotificationNames:
    groups = encoding.loads_object(body).get(member)
    if not isinstance(groups, dict):
        raise ValueError(f"no {member}")
    found: NotificationNames = {}
    count = 0
    for kind in NOTIFICATION_KINDS:
        listed = groups.get(kind)
        names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
        found[kind] = list(dict.fromkeys(names))
        count += len(found[kind])
    if count > MAX_NOTIFICATIONS:
        raise ValueError(f"too many {member}")
    return found


MIN_SECRET_BYTES = 32
_KEY_SIZE = 32
_HKDF_PREFIX = b"mediatord cluster: "
_KEY_PURPOSES = (b"seal", b"requests", b"responses", b"allowances")

# Seconds between the clocks of two nodes.
MAX_TIMESTAMP_SKEW = MAX_CLOCK_SKEW
MAX_NONCES = 100_000

SENDER_HEADER, RECEIVER_HEADER, TIME_HEADER, NONCE_HEADER, MAC_HEADER = AUTHENTICATION_HEADERS = tuple(
    f"Mediatord-{name}" for name in ("Sender", "Receiver", "Time", "Nonce", "Seal")
)
_RAW_HEADERS = [(name, name.encode("ascii")) for name in AUTHENTICATION_HEADERS]

_BOOT_PATTERN = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TIME_PATTERN = re.compile(r"[0-9]{1,15}")
_NONCE_PATTERN = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class ClusterKeys:
    """
    Keys derived from the cluster secret; none reveals the secret or another key.

    :param seal: proves knowledge of the secret to other nodes, which compare it with theirs.
    :param requests: authenticates requests.
    :param responses: authenticates responses.
    :param allowances: pseudonymizes the subjects of rate limits in the store.
    """

    seal: bytes = field(repr=False)
    requests: bytes = field(repr=False)
    responses: bytes = field(repr=False)
    allowances: bytes = field(repr=False)


def read_cluster_keys(path: Path) -> ClusterKeys:
    """
    Derive the keys from the secret in a file, without the white space around it.

    :raise SecretFileError: the file cannot be read, others have access to it, or the secret is too short.
    """
    secret = read_secret_file(path).strip()
    if len(secret) < MIN_SECRET_BYTES:
        raise SecretFileError(f"{path} holds less than {MIN_SECRET_BYTES} bytes; type: openssl rand -hex 32 > {path}")
    return derive_cluster_keys(secret)


def derive_cluster_keys(secret: bytes) -> ClusterKeys:
    """Derive the keys from a secret of at least :data:`MIN_SECRET_BYTES` bytes."""
    return ClusterKeys(
        *(
            HKDF(SHA256(), _KEY_SIZE, salt=None, info=_HKDF_PREFIX + purpose).derive(secret)
            for purpose in _KEY_PURPOSES
        )
    )


class MessageAuthenticationError(Exception):
    """
    A request or response that no other node can have made for this one, or not now.

    :ivar reason: `malformed`, `seal`, `time` or `replay`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class RequestId:
    """
    Identifies one request.

    :param sender: boot of the node that makes it.
    :param receiver: boot of the node that it is for.
    :param time_ms: milliseconds since the epoch, by the clock of the sender.
    """

    sender: str
    receiver: str
    time_ms: int
    nonce: str


class MessageAuthenticator:
    """Computes and verifies the MACs of requests and responses."""

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

    def new_request_id(self, sender: str, receiver: str) -> RequestId:
        """The id of a new request."""
        return RequestId(sender, receiver, int(self._clock.seconds() * 1000), self._new_nonce())

    def authenticate_request(self, request_id: RequestId, method: str, path: str, body: bytes) -> dict[str, str]:
        """The headers that authenticate a request."""
        return {
            SENDER_HEADER: request_id.sender,
            RECEIVER_HEADER: request_id.receiver,
            TIME_HEADER: str(request_id.time_ms),
            NONCE_HEADER: request_id.nonce,
            MAC_HEADER: _compute_mac(self._keys.requests, method, path, request_id, body),
        }

    def verify_request(self, headers: Mapping[str, str], method: str, path: str, body: bytes) -> RequestId:
        """
        The id of a request that a node made, for any receiver.

        :param headers: those of :meth:`authenticate_request`, as far as the request has them.
        :raise MessageAuthenticationError: no node made it just now, or it was received before.
        """
        request_id = _parse_request_id(headers)
        _verify_mac(_compute_mac(self._keys.requests, method, path, request_id, body), headers)
        now_ms = int(self._clock.seconds() * 1000)
        if abs(now_ms - request_id.time_ms) > MAX_TIMESTAMP_SKEW * 1000:
            raise MessageAuthenticationError("time")
        if not self._replays.claim(request_id, now_ms):
            raise MessageAuthenticationError("replay")
        return request_id

    def authenticate_response(self, request_id: RequestId, sender: str, status: int, body: bytes) -> dict[str, str]:
        """
        The headers that authenticate the response to a request.

        :param sender: boot of the responder.
        """
        return {
            SENDER_HEADER: sender,
            MAC_HEADER: _compute_mac(self._keys.responses, str(status), sender, request_id, body),
        }

    def verify_response(self, request_id: RequestId, headers: Mapping[str, str], status: int, body: bytes) -> str:
        """
        The boot of the node that gave this response to our request.

        :param headers: those of :meth:`authenticate_response`, as far as the response has them.
        :raise MessageAuthenticationError: no node gave it.
        """
        sender = headers.get(SENDER_HEADER, "")
        if not _BOOT_PATTERN.fullmatch(sender):
            raise MessageAuthenticationError("malformed")
        _verify_mac(_compute_mac(self._keys.responses, str(status), sender, request_id, body), headers)
        return sender


class ReplayCache:
    """
    Nonces of served requests, for as long as the requests could be replayed.

    When it is full the oldest nonce is dropped, and everything as old as that one is refused from then on.

    :param capacity: largest number of nonces.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._seen: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._floor = -1

    def __len__(self) -> int:
        return len(self._seen)

    def claim(self, request_id: RequestId, now_ms: int) -> bool:
        """Whether a request is new; its time has to be within :data:`MAX_TIMESTAMP_SKEW`."""
        while self._seen and next(iter(self._seen.values())) < now_ms - MAX_TIMESTAMP_SKEW * 1000:
            self._seen.popitem(last=False)
        key = request_id.sender, request_id.nonce
        if key in self._seen or request_id.time_ms <= self._floor:
            return False
        self._seen[key] = request_id.time_ms
        if len(self._seen) > self._capacity:
            _, oldest = self._seen.popitem(last=False)
            self._floor = max(self._floor, oldest)
        return True


def extract_authentication_headers(headers: Headers) -> dict[str, str]:
    """The authentication headers of a request or response, with whatever values they have."""
    return {
        name: values[-1].decode("latin-1") for name, raw in _RAW_HEADERS if (values := headers.getRawHeaders(raw))
    }


def _parse_request_id(headers: Mapping[str, str]) -> RequestId:
    sender, receiver = headers.get(SENDER_HEADER, ""), headers.get(RECEIVER_HEADER, "")
    time_ms, nonce = headers.get(TIME_HEADER, ""), headers.get(NONCE_HEADER, "")
    if not (
        _BOOT_PATTERN.fullmatch(sender)
        and _BOOT_PATTERN.fullmatch(receiver)
        and _TIME_PATTERN.fullmatch(time_ms)
        and _NONCE_PATTERN.fullmatch(nonce)
    ):
        raise MessageAuthenticationError("malformed")
    return RequestId(sender, receiver, int(time_ms), nonce)


def _verify_mac(mac: str, headers: Mapping[str, str]) -> None:
    if not hmac.compare_digest(mac.encode(), headers.get(MAC_HEADER, "").encode()):
        raise MessageAuthenticationError("seal")


def _compute_mac(key: bytes, first: str, second: str, request_id: RequestId, body: bytes) -> str:
    """The length before each part keeps different lists of parts from having the same encoding."""
    parts = first, second, request_id.sender, request_id.receiver, str(request_id.time_ms), request_id.nonce
    encoded = [part.encode() for part in parts]
    text = b"".join([len(part).to_bytes(4, "big") + part for part in encoded]) + sha256(body).digest()
    return hmac.digest(key, text, "sha256").hex()
