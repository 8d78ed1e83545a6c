"""Message Pickup 3.0: status, delivery, acknowledgement, live mode (reference section 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twisted.internet.interfaces import IReactorTime

from mediatord.delivery.connections import ConnectionManager, TooManySubscriptions
from mediatord.didcomm.live_delivery import LiveDelivery
from mediatord.didcomm.messages import MessageOrigin, RecipientKeys, ResponseContent, UnpackedMessage
from mediatord.errors import LiveModeUnsupported, MediationNotGranted, ReplayCacheFull
from mediatord.observability.event_recorder import DeliveryPath, EventRecorder
from mediatord.protocol.canonical_did import canonicalize_did
from mediatord.protocol.didcomm.message_pickup import (
    DELIVERY,
    STATUS,
    AttachmentFormat,
    make_delivery_attachment,
    make_delivery_body,
    make_status_body,
    parse_limit,
    parse_live_delivery,
    parse_message_ids,
    parse_recipient,
)
from mediatord.store.interfaces.messages import AcknowledgementResult, QueueStatus, RemovedMessage
from mediatord.store.interfaces.store import Account, IStore

# A packed reply grows by 4/3 for base64url, and once more where the attachments are base64 themselves.
DELIVERY_BYTES = 1_048_576 * 9 // 16

# Arguments of INonceCache.claim_nonce: digest, until when it is kept, and share of the capacity.
NonceRequest = tuple[bytes, float, float]


@dataclass(frozen=True, slots=True)
class PickupSettings:
    """
    :param delivery_limit: messages in one `delivery` at most.
    :param form: form of the attachments in a `delivery`.
    """

    delivery_limit: int = 100
    form: AttachmentFormat = "as-received"


class Pickup:
    """Serves the requests of an account about its messages."""

    def __init__(
        self,
        clock: IReactorTime,
        store: IStore,
        connections: ConnectionManager[RecipientKeys],
        live: LiveDelivery,
        recorder: EventRecorder,
        settings: PickupSettings,
    ) -> None:
        self._clock = clock
        self._store = store
        self._connections = connections
        self._live = live
        self._recorder = recorder
        self._settings = settings

    async def status_request(
        self, received: UnpackedMessage, account: Account, origin: MessageOrigin
    ) -> ResponseContent:
        """Status of the queue of the account, or of one of its recipient DIDs."""
        named = parse_recipient(received.message.require_body())
        return await self._status(account, origin, named, await self._own(account, named))

    async def delivery_request(
        self, received: UnpackedMessage, account: Account, origin: MessageOrigin
    ) -> ResponseContent:
        """The oldest messages, or a `status` if there are none; removes nothing."""
        body = received.message.require_body()
        named = parse_recipient(body)
        limit = parse_limit(body, self._settings.delivery_limit)
        recipient = await self._own(account, named)
        messages = await self._store.fetch_messages(account.did, recipient, limit=limit, max_bytes=DELIVERY_BYTES)
        if not messages:
            return await self._status(account, origin, named, recipient)
        for message in messages:
            self._recorder.record_push(
                message, [origin.session.name if origin.session else None], "pickup", "didcomm"
            )
        self._live.record_pickup([message.id for message in messages])
        attachments = tuple(
            make_delivery_attachment(message.id, message.payload, message.form, self._settings.form)
            for message in messages
        )
        return ResponseContent(DELIVERY, make_delivery_body(named), attachments)

    async def acknowledge(self, received: UnpackedMessage, account: Account) -> None:
        """Remove the messages of this account that a `messages-received` names."""
        ids = parse_message_ids(received.message.require_body())
        if ids:
            self.record_removed(await self._store.acknowledge(account.did, ids))

    async def acknowledge_once(
        self, account: Account, ids: Sequence[str], claim: NonceRequest, *, with_status: bool
    ) -> AcknowledgementResult | None:
        """
        Claim a nonce, remove messages of this account and read the status of its queues, in one store operation.

        Without capacity for the nonce, the messages are removed all the same. The removal has to be recorded
        (:meth:`record_removed`).

        :return: None if the nonce was claimed before; then nothing was removed.
        :raise StoreUnavailable: nothing was claimed or removed.
        """
        try:
            return await self._store.acknowledge_once(account.did, ids, *claim, with_status=with_status)
        except ReplayCacheFull:
            return AcknowledgementResult(await self._store.acknowledge(account.did, ids))

    def record_removed(self, removed: Sequence[RemovedMessage]) -> None:
        """Record acknowledged messages, and that their pushes arrived."""
        pushed = self._live.resolve_pushes([one.id for one in removed])
        for one in removed:
            path: DeliveryPath = "live" if self._live.was_pushed_live(one, pushed) else "pickup"
            self._recorder.record_acknowledgement(one, path, "didcomm")

    async def status(self, account: Account, origin: MessageOrigin) -> ResponseContent:
        """Status of the queue of the account."""
        return await self._status(account, origin, None, None)

    async def live_delivery_change(
        self, received: UnpackedMessage, account: Account, origin: MessageOrigin
    ) -> ResponseContent:
        """
        Switch pushing to this socket on or off; the backlog is fetched by delivery requests.

        The status counts messages from before presence was published; later ones are pushed.
        """
        wanted = parse_live_delivery(received.message.require_body())
        if wanted and origin.session is None:
            raise LiveModeUnsupported
        if origin.session is not None:
            if wanted and received.authcrypt_sender is not None:
                try:
                    await self._live.subscribe(origin.session, received.authcrypt_sender)
                except TooManySubscriptions:
                    raise LiveModeUnsupported from None
            else:
                self._connections.unsubscribe(origin.session, account.did)
        return await self._status(account, origin, None, None)

    async def _status(
        self, account: Account, origin: MessageOrigin, named: str | None, recipient: str | None
    ) -> ResponseContent:
        status = await self._store.get_queue_status(account.did, recipient)
        return self.make_status(account, origin, status, named)

    def make_status(
        self, account: Account, origin: MessageOrigin, status: QueueStatus, named: str | None = None
    ) -> ResponseContent:
        """
        A `status` with these contents.

        :param named: the recipient DID that it is of, as the request spells it; None for the whole account.
        """
        session = origin.session
        return ResponseContent(
            STATUS,
            make_status_body(
                count=status.message_count,
                total_bytes=status.total_bytes,
                oldest=status.oldest_received_time,
                newest=status.newest_received_time,
                now=self._clock.seconds(),
                recipient_did=named,
                live=session is not None and self._connections.is_subscribed(session, account.did),
            ),
        )

    async def _own(self, account: Account, named: str | None) -> str | None:
        """
        A recipient DID of this account, given in any form.

        :raise MediationNotGranted: it is unknown or somebody else's, which look the same.
        """
        if named is None:
            return None
        did = canonicalize_did(named)
        if await self._store.find_owner(did) == account.did:
            return did
        raise MediationNotGranted
