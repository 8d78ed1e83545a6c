"""
Decentrl part of a load: a sender that repeats events until they are accepted, and a recipient that acknowledges
them.
"""

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

_IDS_PER_ACKNOWLEDGEMENT = 100


class ContractedIdentities:
    """Alice, and Bob, who permits her to send to him."""

    def __init__(self, daemon_client: DaemonClient) -> None:
        self.alice, self.bob = RawDecentrlClient(daemon_client, "alice"), RawDecentrlClient(daemon_client, "bob")
        self.bob.register()
        self.bob.permit_sender(self.alice)


class EventLoad:
    """
    A load of events. An unanswered command is repeated unchanged: it must not be carried out twice.

    :param payloads: all different.
    """

    def __init__(self, identities: ContractedIdentities, payloads: Sequence[str]) -> None:
        self._identities = identities
        self._payloads = payloads
        self._stopped = Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._posts = 0
        self._slowest = 0.0
        self._accepted: set[str] = set()
        self._cut: set[str] = set()
        self._refused: list[str] = []
        self._delivered: dict[str, set[str]] = {}

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def stop(self) -> None:
        """Send no more."""
        self._stopped.set()

    def join(self) -> None:
        """Return when every event was accepted or given up."""
        self._thread.join(GIVE_UP_SECONDS + PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "the sender of events is stuck"

    def drain(self) -> None:
        """Acknowledge all pending events."""
        bob = self._identities.bob
        deadline = time.monotonic() + GIVE_UP_SECONDS
        while True:
            with contextlib.suppress(OSError, HTTPException, AssertionError):
                while pending := bob.pending_events():
                    for event in pending:
                        self._delivered.setdefault(event["payload"], set()).add(event["id"])
                    ids = [event["id"] for event in pending]
                    for start in range(0, len(ids), _IDS_PER_ACKNOWLEDGEMENT):
                        bob.execute(
                            "ACKNOWLEDGE_PENDING_EVENTS", event_ids=ids[start : start + _IDS_PER_ACKNOWLEDGEMENT]
                        )
                return
            assert time.monotonic() < deadline, "there is no end to the events"
            time.sleep(PAUSE_SECONDS)

    def balance(self) -> LedgerBalance:
        """Reconcile the ledger. After a broken acknowledgement an event may be delivered twice."""
        delivered = self._delivered.keys()
        ids = sum(len(ids) for ids in self._delivered.values())
        return LedgerBalance(
            message_count=len(self._payloads),
            posts=self._posts,
            accepted=len(self._accepted),
            refused=len(self._refused),
            cut=len(self._cut - self._accepted),
            received=ids,
            repeated=len((self._cut - self._accepted) & delivered),
            slowest=self._slowest,
            doubtful=0,
            unsent=len(set(self._payloads) - self._accepted - self._cut),
            lost=len(self._accepted - delivered),
            doubled=ids - len(delivered & set(self._payloads)),
            returned=0,
            vanished=0,
            left=0,
        )

    def _run(self) -> None:
        alice, bob = self._identities.alice, self._identities.bob
        for payload in self._payloads:
            raw = alice.command(payload, to=bob.did, channel=PRIVATE_CHANNEL)
            deadline = time.monotonic() + GIVE_UP_SECONDS
            while not self._stopped.is_set() and time.monotonic() < deadline and not self._post(payload, raw):
                self._stopped.wait(PAUSE_SECONDS)

    def _post(self, payload: str, raw: bytes) -> bool:
        """Whether its sender may consider it sent."""
        connection = HTTPConnection("127.0.0.1", self._identities.alice.daemon_client.port, timeout=PATIENCE_SECONDS)
        try:
            connection.connect()
        except OSError:
            connection.close()
            return False
        start = time.monotonic()
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
        self._slowest = max(self._slowest, time.monotonic() - start)
        if response.status == 200 or (reply.get("code") == "DUPLICATE_NONCE" and payload in self._cut):
            self._accepted.add(payload)
            return True
        if reply.get("code") == "DUPLICATE_NONCE" and payload in self._refused:
            # Refused while the outcome was unknown; the ledger shows whether it was carried out.
            self._cut.add(payload)
            return True
        assert response.status == 503, reply
        self._refused.append(payload)
        return False
