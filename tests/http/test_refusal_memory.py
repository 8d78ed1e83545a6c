"""What is refused, and what is never finished, is freed at once: no garbage collector has to find it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType, TracebackType
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.ratelimit.rate_limiter import RateLimits
from tests.http.in_memory_site import ENCRYPTED, InMemorySite, encode_masked_frame, encode_request
from tests.in_memory_identities import PRIVATE, InMemoryIdentity
from tests.in_memory_mediator import MP, PING, InMemoryWallet, pack_forward

PLENTY = {"ip_per_minute": 100_000, "did_per_minute": 100_000, "account_per_minute": 100_000}
LARGE = b"z" * 100_000
ENVELOPE = b'{"protected":"%b","recipients":[{}],"iv":"","ciphertext":"","tag":""}' % LARGE
UNUSUAL: Any = {"X-Anything": "1"}
JSON: Any = {"Content-Type": "application/json"}


class RefusalMemoryTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.site_fixture = InMemorySite(self, limits=PLENTY)
        self.bob = InMemoryWallet(self.site_fixture).enrol()

    def assert_freed(self, case: Callable[[], object]) -> None:
        """
        Garbage may be left, as of any connection that ends, but no frame of ours and nothing of what was received.

        :param case: sends some 100 KB in one piece.
        """
        case()  # what is only made once is made now
        for _ in range(3):  # what is left of other tests may leave more when it is finalized
            gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            case()
            gc.collect()
            held = [one for one in gc.garbage if isinstance(one, BaseException | FrameType | TracebackType)]
            self.assertEqual(held, [])
            texts = [one for value in gc.garbage for one in _contents(value)]
            self.assertEqual([sys.getsizeof(one) for one in texts if sys.getsizeof(one) > 30_000], [])
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()

    def post(self, body: bytes, path: str = "/didcomm", status: int = 400, **headers: str) -> None:
        self.assertEqual(self.site_fixture.post(body, path, **headers).status, status)

    def test_no_envelope(self) -> None:
        """Neither JSON nor anything else."""
        self.assert_freed(lambda: self.post(LARGE))

    def test_not_for_us(self) -> None:
        """An envelope that nobody can open."""
        self.assert_freed(lambda: self.post(ENVELOPE))

    def test_unknown_recipient(self) -> None:
        """On the fast path, as the store refuses it."""
        raw = pack_forward(self.site_fixture, "did:example:nobody", self.bob.letter(LARGE.decode()))
        self.assert_freed(lambda: self.post(raw))

    def test_unsupported(self) -> None:
        """A message that was opened, and of which a problem report is sealed."""
        raws = [self.bob.pack("https://didcomm.org/none/1.0/x", {"a": LARGE.decode()}) for _ in range(2)]
        self.assert_freed(lambda: self.post(raws.pop(), status=200))

    def test_replay(self) -> None:
        """A message that came before."""
        raw = self.bob.pack(PING, {"response_requested": False, "a": LARGE.decode()})
        self.post(raw, status=202)
        self.assert_freed(lambda: self.post(raw, status=200))

    def test_not_enrolled(self) -> None:
        """A request of somebody without an account."""
        other_wallet = InMemoryWallet(self.site_fixture)
        raws = [other_wallet.pack(f"{MP}/status-request", {"a": LARGE.decode()}) for _ in range(2)]
        self.assert_freed(lambda: self.post(raws.pop(), status=200))

    def test_fault(self) -> None:
        """A fault of ours."""
        raw = self.bob.pack(PING, {"a": LARGE.decode()})
        with self.site_fixture.failing("get_account", KeyError("x")):
            self.assert_freed(lambda: self.post(raw, status=500))
        self.flushLoggedErrors(KeyError)

    def test_command(self) -> None:
        """A body that is no command, one that is stale, and one for somebody who is not registered."""
        self.assert_freed(lambda: self.post(LARGE, "/", **JSON))
        new_identity = InMemoryIdentity(self.site_fixture, "Ann")
        stale = new_identity.command(LARGE.decode(), channel=PRIVATE, to=new_identity.did, timestamp=1)
        self.assert_freed(lambda: self.post(stale, "/", status=401, **JSON))
        fresh = [new_identity.command(LARGE.decode(), channel=PRIVATE, to=new_identity.did) for _ in range(2)]
        self.assert_freed(lambda: self.post(fresh.pop(), "/", status=404, **JSON))

    def test_limited(self) -> None:
        """An address over its limit."""
        self.site_fixture.base.rate_limiter.set_limits(RateLimits(1, 1, 1))
        self.assert_freed(lambda: self.post(LARGE, status=429))

    def test_general_path(self) -> None:
        """A request for twisted.web."""
        self.assert_freed(lambda: self.post(LARGE, **UNUSUAL))

    def test_unfinished_request(self) -> None:
        """The client leaves in the middle of a body, on either path."""
        for headers in ({"Content-Type": ENCRYPTED.decode()}, {"X-Anything": "1"}):
            self.assert_freed(partial(self.leave, encode_request("POST", "/didcomm", LARGE, headers)[:-1]))

    def leave(self, data: bytes) -> None:
        line = self.site_fixture.line()
        line.feed(data)
        line.hang_up()

    def test_frames(self) -> None:
        """On sockets of either protocol, and when they are gone."""
        for path, payload in (("/didcomm", LARGE), ("/ws", LARGE), ("/didcomm", ENVELOPE), ("/ws", ENVELOPE)):
            self.assert_freed(partial(self.say, path, encode_masked_frame(payload)))

    def test_unfinished_frames(self) -> None:
        """The client leaves in the middle of a frame, or of a message."""
        for data in (encode_masked_frame(LARGE)[:-1], encode_masked_frame(LARGE, final=False)):
            self.assert_freed(partial(self.say, "/didcomm", data))

    def say(self, path: str, data: bytes) -> None:
        websocket_client = self.site_fixture.websocket_client(path)
        websocket_client.line.feed(data)
        self.site_fixture.settle()
        websocket_client.line.hang_up()


def _contents(value: Any) -> list[Any]:
    """What an object refers to that is text, or is made of it."""
    kinds = (bytes, bytearray, str)
    return [one for one in (value, *gc.get_referents(value)) if isinstance(one, kinds)] + [
        one.getbuffer().obj for one in (value,) if hasattr(one, "getbuffer") and not one.closed
    ]
