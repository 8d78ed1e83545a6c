"""The Decentrl part of a load: somebody who sends events until they are taken, and somebody who takes them away."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException
from threading import Event, Thread
from typing import Any

from mediatord.protocol import encoding
from mediatord.wallet.decentrl_client import PRIVATE_CHANNEL
from tests.integration.delivery_ledger import LedgerBalance
from tests.integration.message_load import PATIENCE_SECONDS
from tests.integration.raw_decentrl_client import JSON, DaemonClient, RawDecentrlClient
from tests.integration.retrying_clients import GIVE_UP_SECONDS, PAUSE_SECONDS

_AT_ONCE = 100


class ContractedIdentities:
    """Alice, whom Bob lets write to him."""

    def __init__(self, daemon_client: DaemonClient) -> None:
        self.alice, self.bob = RawDecentrlClient(daemon_client, "alice"), RawDecentrlClient(daemon_client, "bob")
        self.bob.register()
        self.bob.befriend(self.alice)


class EventLoad:
    """
    A load of events. What gets no answer is sent again as it was: it must not happen twice.

    :param payloads: each of its own.
    """

    def __init__(self, friends: ContractedIdentities, payloads: Sequence[str]) -> None:
        self._friends = friends
        self._payloads = payloads
        self._over = Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._posts = 0
        self._slowest = 0.0
        self._accepted: set[str] = set()
        self._cut: set[str] = set()
        self._refused: list[str] = []
        self._came: dict[str, set[str]] = {}

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def stop(self) -> None:
        """Send nothing more."""
        self._over.set()

    def join(self) -> None:
        """Return when all is out, or was given up."""
        self._thread.join(GIVE_UP_SECONDS + PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "the sender of events is stuck"

    def settle(self) -> None:
        """Take away what has come."""
        bob = self._friends.bob
        until = time.monotonic() + GIVE_UP_SECONDS
        while True:
            with contextlib.suppress(OSError, HTTPException, AssertionError):
                while waiting := bob.pending():
                    for one in waiting:
                        self._came.setdefault(one["payload"], set()).add(one["id"])
                    ids = [one["id"] for one in waiting]
                    for start in range(0, len(ids), _AT_ONCE):
                        bob.get("ACKNOWLEDGE_PENDING_EVENTS", event_ids=ids[start : start + _AT_ONCE])
                return
            assert time.monotonic() < until, "there is no end to the events"
            time.sleep(PAUSE_SECONDS)

    def balance(self) -> LedgerBalance:
        """Reconcile the ledger. After an acknowledgement that was cut off, an event may come twice."""
        came = self._came.keys()
        ids = sum(len(ids) for ids in self._came.values())
        return LedgerBalance(
            message_count=len(self._payloads),
            posts=self._posts,
            accepted=len(self._accepted),
            refused=len(self._refused),
            cut=len(self._cut - self._accepted),
            received=ids,
            repeated=len((self._cut - self._accepted) & came),
            slowest=self._slowest,
            doubtful=0,
            unsent=len(set(self._payloads) - self._accepted - self._cut),
            lost=len(self._accepted - came),
            doubled=ids - len(came & set(self._payloads)),
            returned=0,
            vanished=0,
            left=0,
        )

    def _run(self) -> None:
        alice, bob = self._friends.alice, self._friends.bob
        for payload in self._payloads:
            raw = alice.command(payload, to=bob.did, channel=PRIVATE_CHANNEL)
            until = time.monotonic() + GIVE_UP_SECONDS
            while not self._over.is_set() and time.monotonic() < until and not self._post(payload, raw):
                self._over.wait(PAUSE_SECONDS)

    def _post(self, payload: str, raw: bytes) -> bool:
        """Whether it is out, as far as its sender can know."""
        connection = HTTPConnection("127.0.0.1", self._friends.alice.daemon_client.port, timeout=PATIENCE_SECONDS)
        try:
            connection.connect()
        except OSError:
            connection.close()
            return False
        begun = time.monotonic()
        self._posts += 1
        try:
            connection.request("POST", "/", raw, {"Content-Type": JSON})
            response = connection.getresponse()
            reply: dict[str, Any] = encoding.loads_object(response.read())
        except (OSError, HTTPException, ValueError):
            self._cut.add(payload)
            return False
        finally:
            connection.close()
        self._slowest = max(self._slowest, time.monotonic() - begun)
        if response.status == 200 or (reply.get("code") == "DUPLICATE_NONCE" and payload in self._cut):
            self._accepted.add(payload)
            return True
        if reply.get("code") == "DUPLICATE_NONCE" and payload in self._refused:
            # Refused while nobody knew whether it was done: whether it is must show.
            self._cut.add(payload)
            return True
        assert response.status == 503, reply
        self._refused.append(payload)
        return False
