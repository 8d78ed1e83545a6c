"""What the parts of the contract have in common."""

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
    """An open store in which ALICE has an account with the recipient DID INBOX, and BOB one without any."""

    limits = QueueLimits(max_messages=3, max_bytes=1000)
    caps = DecentrlQuotas()
    max_nonces = 1000

    def make_store(self, clock: IReactorTime, limits: QueueLimits, caps: DecentrlQuotas, max_nonces: int) -> IStore:
        """A store that is not open, the same one behind it for the whole of a test."""
        raise NotImplementedError

    def a_store(self) -> IStore:
        """One that is not open."""
        return self.make_store(self.clock, self.limits, self.caps, self.max_nonces)

    def a_neighbour(self) -> IStore:
        """One that is not open, with the same behind it as :attr:`store`, as another process would have it."""
        return self.a_store()

    def pass_time(self, seconds: float) -> Deferred[None]:
        """Let time pass for leases and allowances; where a server has the clock for them, they are waited for."""
        self.clock.advance(seconds)
        return succeed(None)

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        self.clock = ImmediateClock()
        self.store = self.a_store()
        verifyObject(IStore, self.store)
        await self.store.open()
        await self.store.grant(ALICE)
        await self.store.grant(BOB)
        await self.register(ALICE, INBOX)

    async def tearDown(self) -> None:  # type: ignore[override]  # trial waits for it
        await self.store.close()

    async def register(self, account: str, *dids: str) -> None:
        results = await self.change(account, *((did, "add") for did in dids))
        self.assertEqual(results, ["success"] * len(dids))

    async def change(
        self, account: str, *updates: tuple[str, RecipientUpdateAction], max_recipients: int = 100
    ) -> Sequence[str]:
        return await self.store.update_recipients(account, updates, max_recipients=max_recipients)

    async def put(
        self,
        *ids: str,
        to: str = INBOX,
        ttl: float = HOUR,
        delay: float | None = None,
        data: bytes | None = None,
        origin: int = 0,
    ) -> EnqueueResult:
        """Deposit payloads with these ids in one go."""
        payloads = (make_payload(id, data) for id in ids)
        return await self.put_payloads(*payloads, to=to, ttl=ttl, delay=delay, origin=origin)

    async def put_payloads(
        self, *payloads: Payload, to: str = INBOX, ttl: float = HOUR, delay: float | None = None, origin: int = 0
    ) -> EnqueueResult:
        now = self.clock.seconds()
        due_at = None if delay is None else now + delay
        return await self.store.enqueue(to, payloads, expires_at=now + ttl, due_at=due_at, origin=origin)

    async def waiting(self, account: str = ALICE, recipient_did: str | None = None) -> list[str]:
        """Ids of all that can be fetched."""
        found = await self.store.fetch_messages(account, recipient_did, limit=1000, max_bytes=1 << 30)
        return [message.id for message in found]

    async def count(self, account: str = ALICE, recipient_did: str | None = None) -> tuple[int, int]:
        """How many messages and bytes the status shows."""
        status = await self.store.get_queue_status(account, recipient_did)
        return status.message_count, status.total_bytes
