"""Base of the store contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.trial.unittest import TestCase
from zope.interface.verify import verifyObject

from mediatord.protocol.didcomm.did_methods import derive_did_peer_3
from mediatord.store.interfaces.decentrl import DecentrlQuotas
from mediatord.store.interfaces.messages import EnqueueResult, Payload, QueueLimits
from mediatord.store.interfaces.store import IStore, RecipientUpdateAction
from tests.store.builders import ALICE, BOB, HOUR, ImmediateClock, make_payload

INBOX = "did:key:z6MkInbox"
OTHER = "did:key:z6MkOther"
# Two forms of one did:peer, which are one recipient.
LONG_FORM = "did:peer:2.Ez6LSbysY2xFMRpGMhb7tFTLMpeuPRaqaWM1yECx2AtzE3KCc.SeyJ0IjoiZG0ifQ"
SHORT_FORM = derive_did_peer_3(LONG_FORM)

if TYPE_CHECKING:
    Base = TestCase
else:
    Base = object


class StoreContract(Base):
    """An open store in which ALICE has an account with the recipient DID INBOX, and BOB one without recipients."""

    limits = QueueLimits(max_messages=3, max_bytes=1000)
    caps = DecentrlQuotas()
    max_nonces = 1000

    def make_store(self, clock: IReactorTime, limits: QueueLimits, caps: DecentrlQuotas, max_nonces: int) -> IStore:
        """A closed store; all stores of one test share their data."""
        raise NotImplementedError

    def make_test_store(self) -> IStore:
        """A closed store with the limits of the test class."""
        return self.make_store(self.clock, self.limits, self.caps, self.max_nonces)

    def make_second_store(self) -> IStore:
        """A closed store on the data of :attr:`store`, as another process would open it."""
        return self.make_test_store()

    def pass_time(self, seconds: float) -> Deferred[None]:
        """Let time pass for leases and quotas; where a server has their clock, wait."""
        self.clock.advance(seconds)
        return succeed(None)

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        self.clock = ImmediateClock()
        self.store = self.make_test_store()
        verifyObject(IStore, self.store)
        await self.store.open()
        await self.store.grant(ALICE)
        await self.store.grant(BOB)
        await self.register(ALICE, INBOX)

    async def tearDown(self) -> None:  # type: ignore[override]  # trial waits for it
        await self.store.close()

    async def register(self, account: str, *dids: str) -> None:
        results = await self.update_recipients(account, *((did, "add") for did in dids))
        self.assertEqual(results, ["success"] * len(dids))

    async def update_recipients(
        self, account: str, *updates: tuple[str, RecipientUpdateAction], max_recipients: int = 100
    ) -> Sequence[str]:
        return await self.store.update_recipients(account, updates, max_recipients=max_recipients)

    async def enqueue_ids(
        self,
        *ids: str,
        to: str = INBOX,
        ttl: float = HOUR,
        delay: float | None = None,
        data: bytes | None = None,
        origin: int = 0,
    ) -> EnqueueResult:
        """Enqueue payloads with these ids in one call."""
        payloads = (make_payload(id, data) for id in ids)
        return await self.enqueue_payloads(*payloads, to=to, ttl=ttl, delay=delay, origin=origin)

    async def enqueue_payloads(
        self, *payloads: Payload, to: str = INBOX, ttl: float = HOUR, delay: float | None = None, origin: int = 0
    ) -> EnqueueResult:
        now = self.clock.seconds()
        due_at = None if delay is None else now + delay
        return await self.store.enqueue(to, payloads, expires_at=now + ttl, due_at=due_at, origin=origin)

    async def list_waiting(self, account: str = ALICE, recipient_did: str | None = None) -> list[str]:
        """Ids of all messages that can be fetched."""
        found = await self.store.fetch_messages(account, recipient_did, limit=1000, max_bytes=1 << 30)
        return [message.id for message in found]

    async def count_messages(self, account: str = ALICE, recipient_did: str | None = None) -> tuple[int, int]:
        """Messages and bytes in the queue status."""
        status = await self.store.get_queue_status(account, recipient_did)
        return status.message_count, status.total_bytes
