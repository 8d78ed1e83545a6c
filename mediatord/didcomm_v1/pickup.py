"""Message Pickup 2.0 and 1.0: status, delivery, acknowledgement, live delivery, and batches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from math import inf
from typing import NamedTuple

from mediatord.didcomm.pickup import DELIVERY_BYTES, QueuePickup
from mediatord.didcomm_v1.context import V1AccountRequestHandler, V1Context, V1Request
from mediatord.didcomm_v1.live_delivery import V1LiveDelivery
from mediatord.errors import LiveModeUnsupported
from mediatord.protocol.didcomm.message_pickup import parse_limit, parse_live_delivery, parse_message_ids
from mediatord.protocol.didcomm_v1 import message_pickup
from mediatord.protocol.didcomm_v1.message import V1Answer
from mediatord.protocol.didcomm_v1.message_pickup import (
    BATCH,
    DELIVERY,
    LIST_RESPONSE,
    MAX_DELIVERY,
    STATUS,
    STATUS_1,
    make_batch_members,
    make_delivery_members,
    make_status_members,
)
from mediatord.store.interfaces.messages import ArrivalWindow, QueueStatus, StoredMessage
from mediatord.store.interfaces.store import Account

# Ids of messages in the last batches of all accounts; a forgotten batch is handed out again.
MAX_BATCH_IDS = 100_000
# Pushed messages that are looked through for others behind them.
_MAX_SKIPPED = 100


class _Batch(NamedTuple):
    """
    What an account was handed out last.

    :param at: when.
    :param repeated: those that were handed out before, so that there is no third time.
    """

    ids: tuple[str, ...]
    at: float
    repeated: frozenset[str]


class _LastBatches:
    """The last batch of each account; beyond :data:`MAX_BATCH_IDS` the oldest are forgotten."""

    def __init__(self) -> None:
        self._batches: OrderedDict[str, _Batch] = OrderedDict()
        self._ids = 0

    def __len__(self) -> int:
        """Number of ids."""
        return self._ids

    def get(self, account: str) -> _Batch | None:
        """The last batch of an account."""
        return self._batches.get(account)

    def put(self, account: str, batch: _Batch) -> None:
        """Replace the last batch of an account; an empty one is not kept."""
        self.discard(account)
        if batch.ids:
            self._batches[account] = batch
            self._ids += len(batch.ids)
        while self._ids > MAX_BATCH_IDS:
            self.discard(next(iter(self._batches)))

    def discard(self, account: str) -> None:
        """Forget the last batch of an account."""
        if (batch := self._batches.pop(account, None)) is not None:
            self._ids -= len(batch.ids)


# Seconds in which a message is not handed out again, unless live delivery begins: Credo polls anew before it has
# acknowledged what it got, and shows twice what it gets twice. Its own requests time out after as many.
DELIVERY_SECONDS = 15.0
# Messages that are remembered to have been handed out; a forgotten one may be handed out again.
MAX_DELIVERED_IDS = 100_000


class _Delivered:
    """
    Messages that were handed out in a `delivery` of which nothing is acknowledged, for :data:`DELIVERY_SECONDS`.

    Once a part is acknowledged, the wallet has worked off the delivery, and wants the rest again.
    """

    def __init__(self) -> None:
        # Time, and the ids that were handed out together.
        self._messages: OrderedDict[tuple[str, str], tuple[float, Sequence[str]]] = OrderedDict()
        self._by_account: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, account: str, ids: Sequence[str], now: float) -> None:
        """Messages of an account are handed out together."""
        for id_ in ids:
            self._messages[account, id_] = now, ids
            self._messages.move_to_end((account, id_))
            self._by_account.setdefault(account, set()).add(id_)
        while len(self._messages) > MAX_DELIVERED_IDS:
            self._discard_oldest()

    def find(self, account: str, now: float) -> Set[str]:
        """Ids of the messages of an account."""
        while self._messages and not 0 <= now - next(iter(self._messages.values()))[0] < DELIVERY_SECONDS:
            self._discard_oldest()
        return self._by_account.get(account, frozenset())

    def discard(self, account: str, ids: Iterable[str]) -> None:
        """Forget messages of an account, with those that were handed out together with them."""
        for id_ in ids:
            for one in self._messages.get((account, id_), (0.0, ()))[1]:
                self._discard(account, one)

    def _discard(self, account: str, id_: str) -> None:
        if self._messages.pop((account, id_), None) is not None:
            self._by_account[account].discard(id_)
            if not self._by_account[account]:
                del self._by_account[account]

    def _discard_oldest(self) -> None:
        self._discard(*next(iter(self._messages)))


class V1Pickup:
    """Serves the requests of an account about its messages."""

    def __init__(self, context: V1Context, queue: QueuePickup, live: V1LiveDelivery) -> None:
        self._context = context
        self._common = context.common
        self._queue = queue
        self._live = live
        self._batches = _LastBatches()
        self._delivered = _Delivered()

    def account_handlers(self) -> dict[str, V1AccountRequestHandler]:
        """Handlers by message type."""
        return {
            "messagepickup/2.0/status-request": self._status_request,
            "messagepickup/2.0/delivery-request": self._delivery_request,
            "messagepickup/2.0/messages-received": self._messages_received,
            "messagepickup/2.0/live-delivery-change": self._live_delivery_change,
            "messagepickup/1.0/batch-pickup": self._batch_pickup,
            "messagepickup/1.0/status-request": self._status_request_1,
            "messagepickup/1.0/list-pickup": self._list_pickup,
            "messagepickup/1.0/noop": self._ignore,
        }

    @property
    def batches(self) -> int:
        """Number of messages that are removed when their wallet asks for the next batch."""
        return len(self._batches)

    @property
    def delivered(self) -> int:
        """Number of messages that were handed out a moment ago, and are not handed out again."""
        return len(self._delivered)

    async def _status_request(self, request: V1Request, account: Account) -> V1Answer:
        await self._live.note_pickup(request)
        named, recipient = await self._find_recipient(request, account)
        self._queue.note_poll(account, recipient)
        return await self._answer_status(request, account, named, recipient)

    async def _delivery_request(self, request: V1Request, account: Account) -> V1Answer:
        """
        The oldest messages, or a `status` if there are none; removes nothing.

        It leaves out what the wallet has just been sent, here or on a socket, and may still acknowledge.
        """
        await self._live.note_pickup(request)
        limit = parse_limit(request.message.members, self._common.delivery_limit)
        named, recipient = await self._find_recipient(request, account)
        self._queue.note_poll(account, recipient)
        now = self._common.clock.seconds()
        sent = self._delivered.find(account.did, now) | self._context.live.find_unacknowledged(account.did).keys()
        messages = await self._queue.fetch(account, recipient, limit, request.record.session, leave_out=sent)
        if not messages:
            # Credo asks again for what that counts.
            return self._make_status(request, account, QueueStatus(0, 0), named)
        self._delivered.add(account.did, tuple(message.id for message in messages), now)
        return V1Answer(DELIVERY, make_delivery_members(list_payloads(messages), named))

    async def _messages_received(self, request: V1Request, account: Account) -> V1Answer:
        """
        Remove messages; always answered with the status.

        Credo asks for whatever that counts. So it leaves out what was pushed to a socket of the account and is not
        acknowledged yet, and everything where all that is queued will be pushed.
        """
        ids = parse_message_ids(request.message.members)
        await self._live.note_pickup(request)
        status = None
        self._delivered.discard(account.did, ids)
        if ids:
            status = (await self._queue.acknowledge(account.did, ids, with_status=True)).status
        if status is None:
            status = await self._common.store.get_queue_status(account.did, None)
        left = await self._count_unpushed(account, status)
        return self._make_status(request, account, replace(status, message_count=left) if left else QueueStatus(0, 0))

    async def _count_unpushed(self, account: Account, queued: QueueStatus) -> int:
        """Number of the queued messages that the wallet has to ask for."""
        if self._live.is_implicit(account.did):
            return 0
        pushed = self._context.live.find_unacknowledged(account.did)
        left = max(0, queued.message_count - len(pushed))
        is_pushed = {queued.oldest_received_time, queued.newest_received_time} <= set(pushed.values())
        if not queued.message_count or (not self._common.node and (left or is_pushed)):
            return left
        # Some that were pushed here may be queued no longer; other nodes may have pushed others, which are marked.
        store, limit = self._common.store, min(len(pushed), _MAX_SKIPPED) + MAX_DELIVERY
        arrivals = await store.find_arrivals([account.did], ArrivalWindow(0.0, inf), limit=limit)
        ids = [one.id for one in arrivals if one.id not in pushed][:MAX_DELIVERY]
        messages = await store.find_messages(ids) if ids else []
        return sum(not self._common.node or message.status == "pending" for message in messages)

    async def _live_delivery_change(self, request: V1Request, account: Account) -> V1Answer:
        """Switch pushing to this socket on or off; what is queued is fetched by delivery requests."""
        wanted = parse_live_delivery(request.message.members)
        session = request.origin.session
        if wanted and session is None:
            raise LiveModeUnsupported
        await self._live.note_pickup(request)
        now = self._common.clock.seconds()
        if session is not None:
            if wanted:
                self._delivered.discard(account.did, tuple(self._delivered.find(account.did, now)))
                await self._live.begin_live(request, account, session)
            else:
                self._live.end(session, account.did)
        self._queue.note_poll(account)
        return await self._answer_status(request, account)

    async def _batch_pickup(self, request: V1Request, account: Account) -> V1Answer:
        """
        The oldest messages. They are removed by the next request, as there is no acknowledgement; if that comes late,
        the answer to the last one may be lost, and they are handed out once more. A wallet that repeats a request at
        once, as it has lost the answer, cannot be told from one that fetches more: it loses the batch.
        """
        size = message_pickup.parse_batch_size(request.message.members, self._common.delivery_limit)
        self._queue.note_poll(account)
        now, last = self._common.clock.seconds(), self._batches.get(account.did)
        repeated: frozenset[str] = frozenset()
        if last is not None:
            is_late = not 0 <= now - last.at < self._common.push_timeout
            if done := last.repeated if is_late else last.ids:
                await self._queue.acknowledge(account.did, tuple(done))
            if is_late:
                repeated = frozenset(last.ids)
            else:
                self._batches.discard(account.did)
        messages = await self._queue.fetch(account, None, size, request.record.session)
        ids = tuple(message.id for message in messages)
        self._batches.put(account.did, _Batch(ids, now, repeated.intersection(ids)))
        return V1Answer(BATCH, make_batch_members(list_payloads(messages)))

    async def _status_request_1(self, request: V1Request, account: Account) -> V1Answer:
        self._queue.note_poll(account)
        status = await self._common.store.get_queue_status(account.did, None)
        return V1Answer(STATUS_1, {"message_count": status.message_count, "total_size": status.total_bytes})

    async def _list_pickup(self, request: V1Request, account: Account) -> V1Answer:
        """Some messages by their ids; removes nothing."""
        ids = message_pickup.parse_listed_ids(request.message.members)[: self._common.delivery_limit]
        found = await self._common.store.find_messages(ids) if ids else []
        messages: list[StoredMessage] = []
        size = 0
        for message in found:
            size += len(message.payload)
            if message.account == account.did and (size <= DELIVERY_BYTES or not messages):
                messages.append(message)
        self._queue.record_delivery(messages, request.record.session)
        return V1Answer(LIST_RESPONSE, make_batch_members(list_payloads(messages)))

    async def _ignore(self, request: V1Request, account: Account) -> None:
        """There is nothing to answer: a reply takes the route of its own request."""

    async def _find_recipient(self, request: V1Request, account: Account) -> tuple[str | None, str | None]:
        """The recipient key that a request is restricted to, as it spells it, and its canonical form."""
        parsed = message_pickup.parse_recipient_key(request.message.members)
        if parsed is None:
            return None, None
        named, key = parsed
        return named, await self._queue.find_recipient(account, key)

    async def _answer_status(
        self, request: V1Request, account: Account, named: str | None = None, recipient: str | None = None
    ) -> V1Answer:
        status = await self._common.store.get_queue_status(account.did, recipient)
        return self._make_status(request, account, status, named)

    def _make_status(
        self, request: V1Request, account: Account, status: QueueStatus, named: str | None = None
    ) -> V1Answer:
        session = request.origin.session
        members = make_status_members(
            count=status.message_count,
            total_bytes=status.total_bytes,
            oldest=status.oldest_received_time,
            newest=status.newest_received_time,
            now=self._common.clock.seconds(),
            recipient_key=named,
            live=session is not None and self._common.connections.is_subscribed(session, account.did),
        )
        return V1Answer(STATUS, members)


def list_payloads(messages: list[StoredMessage]) -> list[tuple[str, bytes]]:
    """Ids and payloads of messages."""
    return [(message.id, message.payload) for message in messages]
