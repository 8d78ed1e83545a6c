"""What one node says to another, and what a stranger may say in its place."""

from __future__ import annotations

import json
from collections.abc import Iterable

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock

from mediatord.cluster.peer_protocol import (
    AUTHENTICATION_HEADERS,
    MAX_NOTIFICATIONS,
    NOTIFICATIONS_PATH,
    PROBE_PATH,
    MessageAuthenticator,
    decode_notifications,
    decode_push_result,
    derive_cluster_keys,
)
from mediatord.cluster.peer_server import PeerResponse, PeerServer
from mediatord.cluster.remote_delivery import answer_probe
from tests.fuzz.fuzz_mediator import FuzzMediator
from tests.in_memory_mediator import NOW

_OURS, _OTHER = "boot-of-ours", "boot-of-another"
_KEYS = derive_cluster_keys(b"s" * 32)


class HintTarget:
    """Ways: `h` hints, `p` what was pushed, `n` a body that a node has sealed, `x` headers and body of a stranger."""

    words = (b'"hints"', b'"pushed"', b'"messages"', b'"events"', b'"contracts"', b'"protocol":2', b"Mediatord-Seal")
    longest = 8_192
    most_calls = (1_500, 30)
    most_memory = (500_000, 200)

    def __init__(self) -> None:
        self._grounds = FuzzMediator(lambda site_fixture: None)  # of which only the log is listened to
        self._clock = Clock()
        self._clock.advance(NOW)
        self._authenticator = MessageAuthenticator(self._clock, _KEYS)
        operations = {NOTIFICATIONS_PATH: self._hints, PROBE_PATH: answer_probe}
        self._serving = PeerServer(
            self._clock, _OURS, MessageAuthenticator(self._clock, _KEYS), operations, lambda reason: None
        )

    async def _hints(self, body: bytes) -> bytes:
        return json.dumps(decode_notifications(body)).encode("utf-8", "surrogatepass")

    def close(self) -> None:
        """Listen no more."""
        self._grounds.close()

    def run(self, data: bytes) -> None:
        """It is read, or refused as it is said."""
        self._clock.advance(1)  # so that old nonces are forgotten
        way, rest = data[:1], data[1:]
        if way == b"n":
            headers = self._authenticator.authenticate_request(
                self._authenticator.new_request_id(_OTHER, _OURS), "POST", NOTIFICATIONS_PATH, rest
            )
            answer = self._serve(headers, rest)
            assert answer.status in (200, 400) and answer.authenticated and answer.headers
        elif way == b"x":
            lines, _, body = rest.partition(b"\n\n")
            texts = [line.decode("latin-1") for line in lines.split(b"\n")]
            answer = self._serve(dict(zip(AUTHENTICATION_HEADERS, texts, strict=False)), body)
            assert (answer.status, answer.authenticated, answer.body, dict(answer.headers)) == (401, False, b"{}", {})
        else:
            self._read(way, rest)
        self._grounds.calm()

    def _read(self, way: bytes, rest: bytes) -> None:
        try:
            found = (
                decode_push_result(rest)
                if way == b"p"
                else [name for kind in decode_notifications(rest).values() for name in kind]
            )
        except ValueError:
            return
        assert len(found) <= MAX_NOTIFICATIONS

    def _serve(self, headers: dict[str, str], body: bytes) -> PeerResponse:
        found: list[PeerResponse] = []
        Deferred.fromCoroutine(self._serving.serve("POST", NOTIFICATIONS_PATH, headers, body)).addCallback(
            found.append
        )
        (answer,) = found
        return answer

    def seeds(self) -> Iterable[bytes]:
        """Hints of every kind, and what a stranger could make up."""
        groups = {"messages": ["a", "b"], "events": ["e"], "contracts": ["did:a:b"], "later": [1]}
        for way, member in ((b"h", "hints"), (b"n", "hints"), (b"p", "pushed")):
            yield way + json.dumps({"protocol": 1, member: groups}).encode()
        yield b"n" + json.dumps({"protocol": 1, "hints": {"messages": ["x"] * 1001}}).encode()
        stranger = "\n".join((_OTHER, _OURS, str(int(NOW * 1000)), "0" * 32, "0" * 64))
        yield b"x" + stranger.encode() + b"\n\n{}"


def make() -> HintTarget:
    """The target."""
    return HintTarget()
