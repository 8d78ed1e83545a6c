"""What one node says to another, and what a stranger may say in its place."""

from __future__ import annotations

import json
from collections.abc import Iterable

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock

from mediatord.cluster.hint import HINTS_PATH, MAX_HINTS, PROBE_PATH, read_hints, read_pushed
from mediatord.cluster.inbox import probed
from mediatord.cluster.sealing import HEADERS, Sealing
from mediatord.cluster.secret import derive
from mediatord.cluster.serving import Answer, Serving
from tests.fuzz.grounds import Grounds
from tests.house import NOW

_OURS, _OTHER = "boot-of-ours", "boot-of-another"
_KEYS = derive(b"s" * 32)


class HintTarget:
    """Ways: `h` hints, `p` what was pushed, `n` a body that a node has sealed, `x` headers and body of a stranger."""

    words = (b'"hints"', b'"pushed"', b'"messages"', b'"events"', b'"contracts"', b'"protocol":2', b"Mediatord-Seal")
    longest = 8_192
    most_calls = (1_500, 30)
    most_memory = (500_000, 200)

    def __init__(self) -> None:
        self._grounds = Grounds(lambda premises: None)  # of which only the log is listened to
        self._clock = Clock()
        self._clock.advance(NOW)
        self._sealing = Sealing(self._clock, _KEYS)
        uses = {HINTS_PATH: self._hints, PROBE_PATH: probed}
        self._serving = Serving(self._clock, _OURS, Sealing(self._clock, _KEYS), uses, lambda reason: None)

    async def _hints(self, body: bytes) -> bytes:
        return json.dumps(read_hints(body)).encode("utf-8", "surrogatepass")

    def close(self) -> None:
        """Listen no more."""
        self._grounds.close()

    def run(self, data: bytes) -> None:
        """It is read, or refused as it is said."""
        self._clock.advance(1)  # so that old nonces are forgotten
        way, rest = data[:1], data[1:]
        if way == b"n":
            headers = self._sealing.seal_request(self._sealing.stamp(_OTHER, _OURS), "POST", HINTS_PATH, rest)
            answer = self._serve(headers, rest)
            assert answer.status in (200, 400) and answer.known and answer.headers
        elif way == b"x":
            lines, _, body = rest.partition(b"\n\n")
            texts = [line.decode("latin-1") for line in lines.split(b"\n")]
            answer = self._serve(dict(zip(HEADERS, texts, strict=False)), body)
            assert (answer.status, answer.known, answer.body, dict(answer.headers)) == (401, False, b"{}", {})
        else:
            self._read(way, rest)
        self._grounds.calm()

    def _read(self, way: bytes, rest: bytes) -> None:
        try:
            found = (
                read_pushed(rest) if way == b"p" else [name for kind in read_hints(rest).values() for name in kind]
            )
        except ValueError:
            return
        assert len(found) <= MAX_HINTS

    def _serve(self, headers: dict[str, str], body: bytes) -> Answer:
        found: list[Answer] = []
        Deferred.fromCoroutine(self._serving.serve("POST", HINTS_PATH, headers, body)).addCallback(found.append)
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
