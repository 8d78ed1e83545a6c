"""Limits of trusted peers and of workers, measured by clients."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from itertools import cycle
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.bench.raw_clients import WebSocketClient
from mediatord.bench.wallet_group import build_inner_envelope, enrol_group
from mediatord.protocol import encoding
from mediatord.ratelimit.distributed_limiter import QUOTA_STORE_BACKOFF
from mediatord.wallet.didcomm_client import PICKUP
from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.didcomm_messages import authcrypt, build_forward
from tests.integration.daemon import Daemon
from tests.integration.message_load import prepare_daemon
from tests.integration.raw_decentrl_client import DaemonClient, send_request_on
from tests.integration.test_workers import await_workers

ADDRESS, SENDER = 20, 7
RATE_LIMITED = "e.m.req.rate-limited"
# Messages sent beyond a limit.
EXCESS = 3
TRUSTED = "127.0.0.77"
# On a machine whose store is slow at times, the shared limit is measured again, from another address.
SLOW_STORE_WARNING, SLOW_STORE_ATTEMPTS = "the rate limit store does not respond", 8


class ExactTests(SynchronousTestCase):
    """A daemon, and one wallet with an account."""

    settings: dict[str, Any] = {
        "limits": {
            "ip_per_minute": ADDRESS,
            "did_per_minute": SENDER,
            "trusted_peers": [TRUSTED],
            "trusted_per_minute": 10 * SENDER,
        }
    }

    def setUp(self) -> None:
        self.daemon = prepare_daemon(self.settings)
        self.addCleanup(self.daemon.clean)
        self.daemon.start()
        self.group = enrol_group(self.daemon.url, 1, short=True)
        (self.bob,) = self.group.wallets
        self.daemon_client = DaemonClient(self.daemon)

    def anonymous_forwards(self, count: int) -> list[bytes]:
        """Anonymous forwards to Bob."""
        return [body for body, _ in self.group.forwards(300, count)]

    def authcrypted_forwards(self, sender: WalletIdentity, count: int) -> list[bytes]:
        """Forwards to Bob from one sender."""
        mediator, payload = self.group.mediator, build_inner_envelope(self.bob.identity, 300)
        messages = [
            build_forward(self.bob.did, [payload], to=[mediator.did]) | {"from": sender.did} for _ in range(count)
        ]
        return [authcrypt(message, sender, mediator.document) for message in messages]

    def status_requests(self, count: int) -> list[bytes]:
        """Requests of Bob about his queue."""
        return [self.bob.pack(f"{PICKUP}/status-request")[1] for _ in range(count)]

    def post(self, messages: Sequence[bytes], source: str) -> list[int]:
        """Response statuses of messages posted from an address."""
        with closing(self.daemon_client.connection(source)) as connection:
            return [send_request_on(connection, "POST", "/didcomm", raw).status for raw in messages]

    def count_admitted_forwards(self, messages: Sequence[bytes], source: str) -> int:
        """Number of forwards admitted on a socket: refusals are answered in the clear."""
        with self.open_socket(source) as socket:
            for raw in (*messages, *self.status_requests(1)):
                socket.send(raw)
            frames = socket.take()
            while not any(map(is_envelope, frames)):
                frames += socket.take()
            self.assertEqual({problem_code(frame) for frame in frames[:-1]} or {RATE_LIMITED}, {RATE_LIMITED})
            return len(messages) - len(frames[:-1])

    def open_socket(self, source: str) -> closing[WebSocketClient]:
        """An open socket."""
        return closing(WebSocketClient(f"ws://127.0.0.1:{self.daemon.port}/didcomm", source=source))

    def test_trusted_peer_limit_is_higher(self) -> None:
        """A trusted peer may send ten times as much, its own and others' messages; its neighbour may not."""
        relay, count = WalletIdentity.generate(), 5 * SENDER
        self.assertEqual(self.post(self.authcrypted_forwards(relay, count), TRUSTED), [202] * count)
        self.assertEqual(self.count_admitted_forwards(self.anonymous_forwards(count + EXCESS), TRUSTED), count)
        self.assertEqual(
            self.post(self.authcrypted_forwards(relay, SENDER + 1), "127.0.0.78"), [202] * SENDER + [429]
        )
        rest = ADDRESS - SENDER - 1
        self.assertEqual(self.post(self.anonymous_forwards(rest + 1), "127.0.0.78"), [202] * rest + [429])


def is_envelope(frame: bytes) -> bool:
    """Whether a frame is an envelope."""
    return "ciphertext" in encoding.loads_object(frame)


def problem_code(frame: bytes) -> str:
    """Code of a problem report."""
    return str(encoding.loads_object(frame)["body"]["code"])


class WorkersTests(SynchronousTestCase):
    def test_workers_share_limits(self) -> None:
        """Two workers admit what one process would, within 5 %, over connections to either."""
        limit = 200
        daemon: Daemon = prepare_daemon(
            {"workers": 2, "limits": {"ip_per_minute": limit, "trusted_peers": [TRUSTED]}}
        )
        self.addCleanup(daemon.clean)
        daemon.start()
        await_workers(daemon, 2)
        for number in range(9, 9 + SLOW_STORE_ATTEMPTS):
            written = len(daemon.output())
            admitted = self.count_admitted(DaemonClient(daemon), f"127.0.0.{number}", 2 * limit)
            await_workers(daemon, 2)  # their lines are written by now
            if SLOW_STORE_WARNING not in daemon.output()[written:]:
                break
            time.sleep(2 * QUOTA_STORE_BACKOFF)  # each process enforces its share meanwhile
        self.assertTrue(0.95 * limit <= admitted <= 1.05 * limit, admitted)

    def count_admitted(self, daemon_client: DaemonClient, source: str, count: int) -> int:
        """How many of `count` requests from an address are admitted, over several connections."""
        with ExitStack() as stack:
            connections = [stack.enter_context(closing(daemon_client.connection(source))) for _ in range(16)]
            return sum(
                send_request_on(connection, "POST", "/didcomm", b"no envelope", {"Content-Type": "text/plain"}).status
                != 429
                for connection, _ in zip(cycle(connections), range(count), strict=False)
            )
