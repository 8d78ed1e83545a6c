"""
Subscriptions of DIDComm v1 sockets to the mail of their wallets.

A wallet has one such socket: libraries open another one only when they have lost it, often before the mediator learns
of that. So of several sockets the one that subscribed last gets everything, also what others have not acknowledged.
"""

from __future__ import annotations

from contextlib import suppress
from sys import intern

from twisted.internet.defer import Deferred, DeferredSemaphore

from mediatord.delivery.connections import CompactMultiMap, TooManySubscriptions, WebSocketSession
from mediatord.didcomm.pickup import QueuePickup
from mediatord.didcomm_v1.context import V1Context, V1Request
from mediatord.didcomm_v1.push_writers import MAX_READERS, ImplicitWriter, LiveWriter, PushPacker
from mediatord.errors import LiveModeUnsupported, StoreUnavailable
from mediatord.protocol.didcomm_v1.message import DIDCOMM_ORG, OLD_PREFIX
from mediatord.store.interfaces.store import Account
from mediatord.store.interfaces.v1_connections import ImplicitPickup


class V1LiveDelivery:
    """Begins and ends pushing of messages to sockets."""

    def __init__(self, context: V1Context, queue: QueuePickup, pack: PushPacker) -> None:
        self._context = context
        self._common = context.common
        self._queue = queue
        self._pack = pack
        self._readers = DeferredSemaphore(MAX_READERS)
        self._implicit: dict[str, ImplicitWriter] = {}
        self._implicit_accounts: CompactMultiMap[WebSocketSession, str, None] = CompactMultiMap()
        self._common.connections.on_close(self._session_closed)

    def is_implicit(self, account: str) -> bool:
        """Whether everything that is queued for an account is pushed to a socket here."""
        return account in self._implicit

    async def begin_live(self, request: V1Request, account: Account, session: WebSocketSession) -> None:
        """
        Push what comes from now on, unless another socket subscribes meanwhile.

        :raise LiveModeUnsupported: the socket has too many subscriptions.
        :raise StoreUnavailable: as for :meth:`mediatord.didcomm.pickup.LiveDelivery.subscribe`.
        """
        await self._subscribe(
            session, account.did, LiveWriter(intern(account.did), _find_prefix(request), self._pack)
        )

    async def begin_implicit(self, request: V1Request, account: Account) -> None:
        """
        Push all that is queued, then all that comes, unless another socket subscribes meanwhile; a ping over HTTP has
        no effect.

        :raise LiveModeUnsupported: as for :meth:`begin_live`, as is StoreUnavailable.
        """
        session, connection = request.origin.session, request.received.connection
        if session is None or connection is None:
            return
        if self._common.note_poll is not None:
            self._common.note_poll(account.did)
        if account.did in self._implicit and self._implicit[account.did].session is session:
            return
        writer = ImplicitWriter(
            session,
            intern(account.did),
            _find_prefix(request),
            self._pack,
            connection.implicit_pickup,
            self._common,
            self._context.live,
            self._queue,
            self._readers,
            self._remember,
            self._recall,
        )
        if await self._subscribe(session, account.did, writer):
            self._implicit[writer.account] = writer
            self._implicit_accounts.put(session, writer.account, None)
            writer.begin()

    def end(self, session: WebSocketSession, account: str) -> None:
        """Push nothing more to this socket."""
        self._common.connections.unsubscribe(session, account)
        if account in self._implicit and self._implicit[account].session is session:
            self._end_implicit(account)

    def end_all(self, account: str) -> None:
        """Push nothing more to any socket of this process, of either version, for a removed account."""
        for session, recipient in self._common.connections.subscribers(account):
            if recipient is not None:  # or it speaks Decentrl
                self.end(session, account)
                self._context.live.requeue_pushes(session, account)

    async def note_pickup(self, request: V1Request) -> None:
        """The wallet speaks Message Pickup 2.0, so `delivery` messages can be pushed to it."""
        connection = request.received.connection
        if connection is None:
            return
        if connection.account in self._implicit:
            self._implicit[connection.account].accept_deliveries()
        if connection.implicit_pickup != "delivery":
            await self._remember(connection.account, "delivery")

    def note_problem_report(self, request: V1Request, account: Account) -> None:
        """The wallet has reported a problem, perhaps with the first `delivery` that was pushed to it."""
        if account.did in self._implicit:
            threads = request.message.thid, request.message.pthid
            self._implicit[account.did].note_problem_report([id_ for id_ in threads if id_ is not None])

    async def _subscribe(self, session: WebSocketSession, account: str, writer: LiveWriter) -> bool:
        """Whether no other subscription has followed meanwhile, and the socket is open."""
        subscribing = Deferred.fromCoroutine(self._context.live.subscribe_recipient(session, account, writer))
        # At once, so that of several the last one is left.
        if self._is_writer(session, account, writer):
            self._replace_others(session, account)
        try:
            await subscribing
        except TooManySubscriptions:
            raise LiveModeUnsupported from None
        except StoreUnavailable:
            if self._is_writer(session, account, writer):
                self.end(session, account)
            raise
        return self._is_writer(session, account, writer)

    def _is_writer(self, session: WebSocketSession, account: str, writer: LiveWriter) -> bool:
        return (session, writer) in self._common.connections.subscribers(account)

    def _replace_others(self, session: WebSocketSession, account: str) -> None:
        """End all subscriptions of DIDComm v1 to an account but that of this socket."""
        connections = self._common.connections
        if account in self._implicit:
            self._end_implicit(account)
        for other, recipient in connections.subscribers(account):
            if other is not session and isinstance(recipient, LiveWriter):
                connections.unsubscribe(other, account)
                self._context.live.requeue_pushes(other, account)

    def _end_implicit(self, account: str) -> None:
        writer = self._implicit.pop(account)
        self._implicit_accounts.discard(writer.session, account)
        writer.end()

    def _session_closed(self, session: WebSocketSession) -> None:
        for account, _ in self._implicit_accounts.lookup(session):
            self._end_implicit(account)

    async def _recall(self, account: str) -> ImplicitPickup:
        """How a wallet takes mail, as another worker or node may have found out."""
        with suppress(StoreUnavailable):
            connection = await self._context.connections.get_connection(account)
            if connection is not None:
                return connection.implicit_pickup
        return "unknown"

    async def _remember(self, account: str, how: ImplicitPickup) -> None:
        """Store how a wallet takes mail; without that, it is found out again."""
        with suppress(StoreUnavailable):
            await self._context.connections.change_connection(account, implicit_pickup=how)


def _find_prefix(request: V1Request) -> str:
    """The prefix of message types that the wallet uses."""
    return OLD_PREFIX if request.message.type.prefix == OLD_PREFIX else DIDCOMM_ORG
