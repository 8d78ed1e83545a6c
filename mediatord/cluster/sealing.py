"""
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
from dataclasses import dataclass
from hashlib import sha256

from twisted.internet.interfaces import IReactorTime
from twisted.web.http_headers import Headers

from mediatord.cluster.secret import ClusterKeys
from mediatord.interfaces import CLOCKS_APART

# Seconds that the clocks of two nodes may be apart.
WINDOW = CLOCKS_APART
MAX_NONCES = 100_000

SENDER, RECEIVER, TIME, NONCE, SEAL = (
    f"Mediatord-{name}" for name in ("Sender", "Receiver", "Time", "Nonce", "Seal")
)
HEADERS = SENDER, RECEIVER, TIME, NONCE, SEAL

_BOOT = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TIME = re.compile(r"[0-9]{1,15}")
_NONCE = re.compile(r"[0-9a-f]{32}")


class NotSealed(Exception):
    """
    A request or response that no other node can have made for us, or not now.

    :ivar reason: one of a few words: `malformed`, `seal`, `time`, `replay`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Stamp:
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


class Sealing:
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
        self._replays = Replays(max_nonces)

    def stamp(self, sender: str, receiver: str) -> Stamp:
        """A fresh one."""
        return Stamp(sender, receiver, self._now_ms(), self._new_nonce())

    def seal_request(self, stamp: Stamp, method: str, path: str, body: bytes) -> dict[str, str]:
        """The headers that a request needs."""
        return {
            SENDER: stamp.sender,
            RECEIVER: stamp.receiver,
            TIME: str(stamp.time_ms),
            NONCE: stamp.nonce,
            SEAL: self._of_request(stamp, method, path, body),
        }

    def open_request(self, headers: Mapping[str, str], method: str, path: str, body: bytes) -> Stamp:
        """
        The stamp of a request that a node made, for whichever receiver.

        :param headers: those that :meth:`seal_request` gives, as far as there are any.
        :raise NotSealed: it was not made by a node, not just now, or came before.
        """
        stamp = _read_stamp(headers)
        _check(self._of_request(stamp, method, path, body), headers.get(SEAL, ""))
        now_ms = self._now_ms()
        if abs(now_ms - stamp.time_ms) > WINDOW * 1000:
            raise NotSealed("time")
        if not self._replays.claim(stamp, now_ms):
            raise NotSealed("replay")
        return stamp

    def seal_response(self, stamp: Stamp, sender: str, status: int, body: bytes) -> dict[str, str]:
        """
        The headers that the response to a request needs.

        :param sender: boot of the node that answers.
        """
        return {SENDER: sender, SEAL: self._of_response(stamp, sender, status, body)}

    def open_response(self, stamp: Stamp, headers: Mapping[str, str], status: int, body: bytes) -> str:
        """
        The boot of the node that gave this response to our request.

        :param headers: those that :meth:`seal_response` gives, as far as there are any.
        :raise NotSealed: none did.
        """
        sender = headers.get(SENDER, "")
        if not _BOOT.fullmatch(sender):
            raise NotSealed("malformed")
        _check(self._of_response(stamp, sender, status, body), headers.get(SEAL, ""))
        return sender

    def _of_request(self, stamp: Stamp, method: str, path: str, body: bytes) -> str:
        return _mac(self._keys.requests, method, path, *_parts(stamp), body=body)

    def _of_response(self, stamp: Stamp, sender: str, status: int, body: bytes) -> str:
        return _mac(self._keys.responses, str(status), sender, *_parts(stamp), body=body)

    def _now_ms(self) -> int:
        return int(self._clock.seconds() * 1000)


class Replays:
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

    def claim(self, stamp: Stamp, now_ms: int) -> bool:
        """Whether a request is new; its time has to be within :data:`WINDOW`."""
        self._forget(now_ms)
        key = stamp.sender, stamp.nonce
        if key in self._seen or stamp.time_ms <= self._floor:
            return False
        self._seen[key] = stamp.time_ms
        if len(self._seen) > self._capacity:
            _, oldest = self._seen.popitem(last=False)
            self._floor = max(self._floor, oldest)
        return True

    def _forget(self, now_ms: int) -> None:
        while self._seen and next(iter(self._seen.values())) < now_ms - WINDOW * 1000:
            self._seen.popitem(last=False)


def plain(headers: Headers) -> dict[str, str]:
    """Those headers of a request or response that concern seals, whatever bytes they have."""
    found = {name: headers.getRawHeaders(name.encode("ascii")) for name in HEADERS}
    return {name: values[-1].decode("latin-1") for name, values in found.items() if values}


def _read_stamp(headers: Mapping[str, str]) -> Stamp:
    values = [headers.get(name, "") for name in (SENDER, RECEIVER, TIME, NONCE)]
    kinds = (_BOOT, _BOOT, _TIME, _NONCE)
    if not all(kind.fullmatch(value) for kind, value in zip(kinds, values, strict=True)):
        raise NotSealed("malformed")
    sender, receiver, time_ms, nonce = values
    return Stamp(sender, receiver, int(time_ms), nonce)


def _check(ours: str, theirs: str) -> None:
    if not hmac.compare_digest(ours.encode(), theirs.encode()):
        raise NotSealed("seal")


def _parts(stamp: Stamp) -> tuple[str, ...]:
    return stamp.sender, stamp.receiver, str(stamp.time_ms), stamp.nonce


def _mac(key: bytes, *parts: str, body: bytes) -> str:
    """No two different lists of parts make the same text: each has its length before it."""
    encoded = [part.encode() for part in parts]
    text = b"".join(len(part).to_bytes(4, "big") + part for part in encoded) + sha256(body).digest()
    return hmac.digest(key, text, "sha256").hex()
