"""Message Pickup 3.0: status, delivery, acknowledgement, live mode (reference section 6)."""

from __future__ import annotations

from dataclasses import dataclass

from twisted.internet.interfaces import IReactorTime

from mediatord.didcomm.exchange import Answer, Origin, Reader, Received
from mediatord.didcomm.live import Live
from mediatord.errors import LiveModeUnsupported, NotEnrolled
from mediatord.interfaces import Account, IStore
from mediatord.journal import Journal, Path
from mediatord.presence import Connections, TooManyDIDs
from mediatord.protocol.canonical_did import canonical_did
from mediatord.protocol.didcomm.pickup import (
    DELIVERY,
    STATUS,
    DeliveryForm,
    delivery_attachment,
    delivery_body,
    read_ids,
    read_limit,
    read_live,
    read_recipient,
    status_body,
    status_times,
)

# A packed reply grows by 4/3 for base64url, and once more where the attachments are base64 themselves.
DELIVERY_BYTES = 1_048_576 * 9 // 16


@dataclass(frozen=True, slots=True)
class PickupSettings:
    """
    :param delivery_limit: messages in one `delivery` at most.
    :param form: form of the attachments in a `delivery`.
    """

    delivery_limit: int = 100
    form: DeliveryForm = "as-received"


class Pickup:
    """Answers the requests of an account about its own messages."""

    def __init__(
        self,
        clock: IReactorTime,
        store: IStore,
        connections: Connections[Reader],
        live: Live,
        journal: Journal,
        settings: PickupSettings,
    ) -> None:
        self._clock = clock
        self._store = store
        self._connections = connections
        self._live = live
        self._journal = journal
        self._settings = settings

    async def status_request(self, received: Received, account: Account, origin: Origin) -> Answer:
        """How much waits, for all of the account or for one of its recipient DIDs."""
        named = read_recipient(received.message.object())
        return await self._status(account, origin, named, await self._own(account, named))

    async def delivery_request(self, received: Received, account: Account, origin: Origin) -> Answer:
        """The oldest messages, or a `status` when there are none; nothing is removed by this."""
        body = received.message.object()
        named = read_recipient(body)
        limit = read_limit(body, self._settings.delivery_limit)
        recipient = await self._own(account, named)
        messages = await self._store.fetch(account.did, recipient, limit=limit, max_bytes=DELIVERY_BYTES)
        if not messages:
            return await self._status(account, origin, named, recipient)
        for message in messages:
            self._journal.pushed(message, [origin.session.name if origin.session else None], "pickup", "didcomm")
        self._live.handed_out([message.id for message in messages])
        attachments = tuple(
            delivery_attachment(message.id, message.payload, message.form, self._settings.form)
            for message in messages
        )
        return Answer(DELIVERY, delivery_body(named), attachments)

    async def acknowledge(self, received: Received, account: Account) -> None:
        """Remove what was acknowledged by a `messages-received`, if it belongs to this account."""
        ids = read_ids(received.message.object())
        if ids:
            removed = await self._store.acknowledge(account.did, ids)
            pushed = self._live.settle(one.id for one in removed)
            for one in removed:
                path: Path = "live" if self._live.was_live(one, pushed) else "pickup"
                self._journal.acknowledged(one, path, "didcomm")

    async def status(self, account: Account, origin: Origin) -> Answer:
        """How much waits for all of the account."""
        return await self._status(account, origin, None, None)

    async def live_delivery_change(self, received: Received, account: Account, origin: Origin) -> Answer:
        """
        Switch pushing to this very socket on or off; the backlog stays for a delivery-request.

        What came before other nodes know of the socket is in the status, what comes after that is pushed.
        """
        wanted = read_live(received.message.object())
        if wanted and origin.session is None:
            raise LiveModeUnsupported
        if origin.session is not None:
            if wanted and received.correspondent is not None:
                try:
                    await self._live.subscribe(origin.session, received.correspondent)
                except TooManyDIDs:
                    raise LiveModeUnsupported from None
            else:
                self._connections.unsubscribe(origin.session, account.did)
        return await self._status(account, origin, None, None)

    async def _status(self, account: Account, origin: Origin, named: str | None, recipient: str | None) -> Answer:
        status = await self._store.status(account.did, recipient)
        session = origin.session
        return Answer(
            STATUS,
            status_body(
                count=status.message_count,
                total_bytes=status.total_bytes,
                times=status_times(status.oldest_received_time, status.newest_received_time),
                now=self._clock.seconds(),
                recipient_did=named,
                live=session is not None and self._connections.is_subscribed(session, account.did),
            ),
        )

    async def _own(self, account: Account, named: str | None) -> str | None:
        """
        A recipient DID of this account, by any of its names.

        :raise NotEnrolled: it is unknown or somebody else's, which look the same.
        """
        if named is None:
            return None
        did = canonical_did(named)
        if await self._store.owner(did) == account.did:
            return did
        raise NotEnrolled
