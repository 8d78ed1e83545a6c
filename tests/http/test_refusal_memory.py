"""Refused and unfinished requests are freed at once, without the garbage collector."""

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

HIGH_LIMITS = {"ip_per_minute": 100_000, "did_per_minute": 100_000, "account_per_minute": 100_000}
LARGE = b"z" * 100_000
ENVELOPE = b'{"protected":"%b","recipients":[{}],"iv":"","ciphertext":"","tag":""}' % LARGE
GENERAL_PATH_HEADERS: Any = {"X-Anything": "1"}
JSON: Any = {"Content-Type": "application/json"}


class RefusalMemoryTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.site_fixture = InMemorySite(self, limits=HIGH_LIMITS)
        self.bob = InMemoryWallet(self.site_fixture).enrol()

    def assert_freed(self, case: Callable[[], object]) -> None:
        """
        Garbage may remain, as of any connection that ends, but no frame of mediatord and nothing that was received.

        :param case: sends some 100 KB in one piece.
        """
        case()  # warm up caches
        for _ in range(3):  # finalizing garbage of other tests may create more
            gc.collect()
        gc.disable()
        gc.freeze()  # what other tests have left may become garbage now
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            case()
            gc.collect()
            held = [item for item in gc.garbage if isinstance(item, BaseException | FrameType | TracebackType)]
            self.assertEqual(held, [])
            texts = [element for value in gc.garbage for element in _text_members(value)]
            self.assertEqual([sys.getsizeof(member) for member in texts if sys.getsizeof(member) > 30_000], [])
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.unfreeze()
            gc.enable()

    def post(self, body: bytes, path: str = "/didcomm", status: int = 400, **headers: str) -> None:
        self.assertEqual(self.site_fixture.post(body, path, **headers).status, status)

    def test_invalid_envelope(self) -> None:
        """Invalid JSON and other bytes."""
        self.assert_freed(lambda: self.post(LARGE))

    def test_undecryptable_envelope(self) -> None:
        """An envelope for other keys."""
        self.assert_freed(lambda: self.post(ENVELOPE))

    def test_unknown_recipient(self) -> None:
        """Refused by the store on the fast path."""
        raw = pack_forward(self.site_fixture, "did:example:nobody", self.bob.make_payload(LARGE.decode()))
        self.assert_freed(lambda: self.post(raw))

    def test_unsupported_message_type(self) -> None:
        """A decrypted message that gets an encrypted problem report."""
        raws = [self.bob.pack("https://didcomm.org/none/1.0/x", {"a": LARGE.decode()}) for _ in range(2)]
        self.assert_freed(lambda: self.post(raws.pop(), status=200))

    def test_replayed_message(self) -> None:
        """A message sent twice."""
        raw = self.bob.pack(PING, {"response_requested": False, "a": LARGE.decode()})
        self.post(raw, status=202)
        self.assert_freed(lambda: self.post(raw, status=200))

    def test_sender_without_account(self) -> None:
        """A request from a sender without an account."""
        other_wallet = InMemoryWallet(self.site_fixture)
        raws = [other_wallet.pack(f"{MP}/status-request", {"a": LARGE.decode()}) for _ in range(2)]
        self.assert_freed(lambda: self.post(raws.pop(), status=200))

    def test_internal_error(self) -> None:
        """An internal error."""
        raw = self.bob.pack(PING, {"a": LARGE.decode()})
        with self.site_fixture.failing("get_account", KeyError("x")):
            self.assert_freed(lambda: self.post(raw, status=500))
        self.flushLoggedErrors(KeyError)

    def test_refused_commands(self) -> None:
        """An invalid command, a stale one, and one for an unregistered DID."""
        self.assert_freed(lambda: self.post(LARGE, "/", **JSON))
        new_identity = InMemoryIdentity(self.site_fixture, "Ann")
        stale = new_identity.command(LARGE.decode(), channel=PRIVATE, to=new_identity.did, timestamp=1)
        self.assert_freed(lambda: self.post(stale, "/", status=401, **JSON))
        fresh = [new_identity.command(LARGE.decode(), channel=PRIVATE, to=new_identity.did) for _ in range(2)]
        self.assert_freed(lambda: self.post(fresh.pop(), "/", status=404, **JSON))

    def test_rate_limited_request(self) -> None:
        """A request above the limit of its address."""
        self.site_fixture.base.rate_limiter.set_limits(RateLimits(1, 1, 1))
        self.assert_freed(lambda: self.post(LARGE, status=429))

    def test_general_path(self) -> None:
        """A request on the general path."""
        self.assert_freed(lambda: self.post(LARGE, **GENERAL_PATH_HEADERS))

    def test_unfinished_request(self) -> None:
        """The client disconnects within a body, on either path."""
        for headers in ({"Content-Type": ENCRYPTED.decode()}, {"X-Anything": "1"}):
            self.assert_freed(
                partial(self.disconnect_within, encode_request("POST", "/didcomm", LARGE, headers)[:-1])
            )

    def disconnect_within(self, data: bytes) -> None:
        transport = self.site_fixture.connect()
        transport.feed(data)
        transport.disconnect()

    def test_frames(self) -> None:
        """Frames on sockets of either protocol, also after they close."""
        for path, payload in (("/didcomm", LARGE), ("/ws", LARGE), ("/didcomm", ENVELOPE), ("/ws", ENVELOPE)):
            self.assert_freed(partial(self.send_frames, path, encode_masked_frame(payload)))

    def test_unfinished_frames(self) -> None:
        """The client disconnects within a frame or a fragmented message."""
        for data in (encode_masked_frame(LARGE)[:-1], encode_masked_frame(LARGE, final=False)):
            self.assert_freed(partial(self.send_frames, "/didcomm", data))

    def send_frames(self, path: str, data: bytes) -> None:
        websocket_client = self.site_fixture.websocket_client(path)
        websocket_client.transport.feed(data)
        self.site_fixture.run_due_calls()
        websocket_client.transport.disconnect()


def _text_members(value: Any) -> list[Any]:
    """Text that an object holds, or containers of it."""
    kinds = (bytes, bytearray, str)
    return [item for item in (value, *gc.get_referents(value)) if isinstance(item, kinds)] + [
        element.getbuffer().obj for element in (value,) if hasattr(element, "getbuffer") and not element.closed
    ]
