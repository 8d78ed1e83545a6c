"""
Delivery to wallets of DIDComm v1 that have an endpoint of their own, such as ACA-Py, which has no other way to get
its mail: endpoints of connections, replies, and mail that stayed queued while a wallet was away.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import inf

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

from mediatord.cluster.leases import LeaderLease
from mediatord.didcomm.endpoint_delivery import (
    MAX_PENDING_BYTES,
    MAX_PENDING_BYTES_PER_ACCOUNT,
    MAX_PENDING_PER_ACCOUNT,
    POST_TIMEOUT,
    EndpointDelivery,
    is_listed_uri,
)
from mediatord.didcomm.messages import WrapError
from mediatord.identity.v1_identity import V1Identity
from mediatord.protocol import encoding
from mediatord.protocol.didcomm.did_document import MAX_ROUTING_KEYS, ServiceEndpoint
from mediatord.protocol.didcomm.jwe import ENCRYPTED_MEDIA_TYPE
from mediatord.protocol.didcomm_v1.envelope import ENVELOPE_MEDIA_TYPE, is_v1_envelope, pack_anoncrypt
from mediatord.protocol.didcomm_v1.keys import InvalidKey, encode_base58_key
from mediatord.protocol.didcomm_v1.message import DIDCOMM_ORG
from mediatord.ratelimit.registration import AccessList
from mediatord.runtime.failure_logging import LogThrottle
from mediatord.runtime.periodic_tasks import PeriodicTasks, run_logging_failures
from mediatord.runtime.request_time import outside_request
from mediatord.store.interfaces.messages import StoredMessage
from mediatord.store.interfaces.store import FIRST_DAY_SECONDS, IStore
from mediatord.store.interfaces.v1_connections import IV1ConnectionStore, V1Connection

# Replies that may be under way for one address: many wallets of an organisation may share it.
MAX_REPLIES_PER_PEER = 16
MAX_WRAPPED_BYTES = 8_388_608

# Seconds between two attempts for an account whose wallet sends requests.
CONTACT_PAUSE = 10.0
# Seconds until an account whose wallet stays silent is tried again, doubled each time.
FIRST_RETRY = 120.0
LAST_RETRY = 3_600.0
# Accounts with mail that stayed queued, and such that were tried lately; beyond that the longest known are forgotten,
# until the next search.
MAX_ACCOUNTS = 10_000

RETRIES_INTERVAL = 5.0
# Seconds between two searches for mail that former processes, or dead nodes, have left.
SEARCH_INTERVAL = 3_600.0
SEARCH_PAGE = 100
_SEARCH_PAUSE = 0.01

_ENVELOPE_MEDIA_TYPE = ENVELOPE_MEDIA_TYPE.encode("ascii")
_V2_MEDIA_TYPE = ENCRYPTED_MEDIA_TYPE.encode("ascii")


class V1EndpointResolver:
    """
    Finds the endpoints of connections, and wraps messages for them.

    :param identity: returns the mediator's keys of v1.
    :param access: access list; nothing is posted for denied accounts.
    :param own_uris: the mediator's own service URIs, which are never POSTed to.
    :param owns_key: whether a key is the mediator's; what is wrapped for it would come back, to be posted again.
    :param new_id: source of message ids.
    """

    def __init__(
        self,
        connections: IV1ConnectionStore,
        identity: Callable[[], V1Identity],
        access: AccessList,
        own_uris: frozenset[str],
        owns_key: Callable[[str], bool],
        new_id: Callable[[], str],
    ) -> None:
        self._connections = connections
        self._identity = identity
        self._access = access
        self._own_uris = own_uris
        self._owns_key = owns_key
        self._new_id = new_id

    async def resolve_account(self, account: str) -> list[ServiceEndpoint]:
        """
        The endpoint for messages of an account, if it has one.

        :raise StoreUnavailable: unknown.
        """
        # By its key it is cached, which counts here for each forward; it may have one of a retired secret.
        connection = await self._connections.find_connection(self._identity().connection_key(account).did_key)
        if connection is None:
            connection = await self._connections.get_connection(account)
        return [] if connection is None else self.resolve_connection(connection)

    def resolve_connection(self, connection: V1Connection) -> list[ServiceEndpoint]:
        """The endpoint of a connection, if it has one that may be posted to."""
        uri = connection.endpoint
        if uri is None or self._access.denies(connection.account):
            return []
        if is_listed_uri(uri, self._own_uris) or any(map(self._owns_key, connection.routing_keys)):
            return []
        return [ServiceEndpoint(uri, routing_keys=connection.routing_keys)]

    async def wrap(
        self, body: bytes, recipient: str, endpoint: ServiceEndpoint, peer: str | None = None
    ) -> tuple[bytes, bytes]:
        """
        A message in an anonymous forward for each routing key of an endpoint, the last one outermost, and its media
        type (RFC 0094).

        :raise WrapError: there are too many keys, one of them cannot be encrypted to, or the result is too long.
        """
        if len(endpoint.routing_keys) > MAX_ROUTING_KEYS:
            raise WrapError
        to = recipient
        for routing_key in endpoint.routing_keys:
            if len(body) > MAX_WRAPPED_BYTES:
                raise WrapError
            try:
                body = pack_anoncrypt(self._make_forward(body, to), routing_key)
            except InvalidKey:
                raise WrapError from None
            to = routing_key
        # A sender may have put an envelope of DIDComm v2 into the queue.
        is_v1 = bool(endpoint.routing_keys) or is_v1_envelope(body)
        return body, _ENVELOPE_MEDIA_TYPE if is_v1 else _V2_MEDIA_TYPE

    def _make_forward(self, body: bytes, to: str) -> bytes:
        try:
            to = encode_base58_key(to)  # as senders spell it
        except InvalidKey:
            pass
        msg = encoding.wrap_json_fragment(body)
        return encoding.dumps(
            {"@type": f"{DIDCOMM_ORG}routing/1.0/forward", "@id": self._new_id(), "to": to, "msg": msg}
        )


@dataclass(slots=True)
class _Backlog:
    """
    Mail of an account that may have stayed queued.

    :param tried_at: when it was read from the queue last.
    :param retry_at: when that is repeated, even if the wallet stays silent; infinite if nothing was left.
    :param pause: seconds from one retry to the next.
    :param failures: number of messages that have stayed queued.
    """

    tried_at: float = -inf
    retry_at: float = inf
    pause: float = FIRST_RETRY
    failures: int = 0


class V1EndpointDelivery(PeriodicTasks):
    """
    POSTs replies, and mail that stayed queued: when the wallet shows itself by a request or by taking another
    message, else at intervals that double from two minutes to an hour.

    :param delivery: POSTs messages, first when they arrive.
    :param delivers_mail: False to POST replies only.
    :param lease: of the node that searches for mail that nobody retries; None for a single node.
    """

    name = "mail for endpoints"

    def __init__(
        self,
        clock: IReactorTime,
        store: IStore,
        connections: IV1ConnectionStore,
        resolver: V1EndpointResolver,
        delivery: EndpointDelivery,
        lease: LeaderLease | None = None,
        *,
        delivers_mail: bool = True,
    ) -> None:
        tasks = ((self._retry, RETRIES_INTERVAL), (self._search, RETRIES_INTERVAL)) if delivers_mail else ()
        super().__init__(clock, tasks, "delivery of queued mail to endpoints")
        self._store = store
        self._connections = connections
        self._resolver = resolver
        self._delivery = delivery
        self._lease = lease
        self._delivers_mail = delivers_mail
        self._backlogs: OrderedDict[str, _Backlog] = OrderedDict()
        # Accounts whose contact was recorded here, with the time.
        self._contacts: OrderedDict[str, float] = OrderedDict()
        self._searched_at = -inf
        self._warning = LogThrottle(clock)
        delivery.add_v1(resolver, self._note_end)

    @property
    def remembered(self) -> int:
        """Number of accounts whose mail may have stayed queued."""
        return len(self._backlogs)

    def can_reply(self, connection: V1Connection, peer: str) -> bool:
        """Whether the wallet has an endpoint, and one more reply may be posted for this rate limit key."""
        has_endpoint = bool(self._resolver.resolve_connection(connection))
        return has_endpoint and self._delivery.has_room_for_reply(peer, MAX_REPLIES_PER_PEER)

    def reply(self, connection: V1Connection, packed: bytes, peer: str) -> None:
        """Begin to POST a packed reply to the endpoint of a connection; one attempt, never queued."""
        targets = self._resolver.resolve_connection(connection)
        self._delivery.post_reply(self._resolver, targets, connection.account, packed, peer)

    def resume(self, connection: V1Connection) -> None:
        """The wallet has shown itself: deliver what is still queued for it, if it has an endpoint."""
        if self._delivers_mail and self.running and self._resolver.resolve_connection(connection):
            # What has just come may be under way in the process that took it.
            self._resume(connection.account, POST_TIMEOUT)

    def _resume(self, account: str, min_age: float = 0.0) -> None:
        backlog, now = self._find_backlog(account), self._clock.seconds()
        if 0 <= now - backlog.tried_at < CONTACT_PAUSE:
            backlog.retry_at = min(backlog.retry_at, backlog.tried_at + CONTACT_PAUSE)
            return
        self._begin(self._read_queue(account, min_age))

    def _find_backlog(self, account: str) -> _Backlog:
        backlog = self._backlogs.get(account)
        if backlog is None:
            backlog = self._backlogs[account] = _Backlog()
            if len(self._backlogs) > MAX_ACCOUNTS:
                self._backlogs.popitem(last=False)
        return backlog

    def _note_end(self, account: str, is_delivered: bool) -> None:
        """A message for an account was delivered, or stays in the queue."""
        if not self.running:
            return
        if not is_delivered:
            backlog = self._find_backlog(account)
            backlog.failures += 1
            backlog.retry_at = min(backlog.retry_at, self._clock.seconds() + backlog.pause)
            return
        self._record_contact(account)
        self._delivery.retry_now(account)
        known = self._backlogs.get(account)
        if known is not None and known.retry_at < inf:
            # More is queued, and the wallet takes messages.
            known.tried_at, known.pause = -inf, FIRST_RETRY
            if not self._delivery.is_delivering(account):
                self._resume(account)

    def _record_contact(self, account: str) -> None:
        """A wallet that takes messages is in use, though it may send no requests; recorded once a day."""
        now, recorded_at = self._clock.seconds(), self._contacts.get(account, -inf)
        if 0 <= now - recorded_at < FIRST_DAY_SECONDS:
            return
        self._contacts[account] = now
        self._contacts.move_to_end(account)
        if len(self._contacts) > MAX_ACCOUNTS:
            self._contacts.popitem(last=False)
        self._begin(self._store.record_contact(account))

    def _begin(self, work: Awaitable[None]) -> None:
        with outside_request():
            Deferred.fromCoroutine(run_logging_failures(work, self._what, self._warning))

    async def _read_queue(self, account: str, min_age: float = 0.0) -> None:
        """Begin to deliver the oldest messages of an account, except younger ones than `min_age` seconds."""
        backlog, now = self._find_backlog(account), self._clock.seconds()
        backlog.tried_at, backlog.retry_at = now, now + backlog.pause
        backlog.pause = min(2 * backlog.pause, LAST_RETRY)
        self._delivery.retry_now(account)
        failures, messages = backlog.failures, list[StoredMessage]()
        if await self._resolver.resolve_account(account):
            messages = await self._store.fetch_messages(
                account, None, limit=MAX_PENDING_PER_ACCOUNT, max_bytes=MAX_PENDING_BYTES_PER_ACCOUNT
            )
        if not messages and failures == backlog.failures:  # else one came meanwhile, and stays queued
            backlog.retry_at, backlog.pause = inf, FIRST_RETRY
        for message in messages:
            if message.status == "pending" and not 0 <= now - message.received_at < min_age:
                self._delivery.enqueue(message)

    async def _retry(self) -> None:
        now = self._clock.seconds()
        for account, backlog in list(self._backlogs.items()):
            if backlog.retry_at <= now:
                await self._wait_for_room()
                await self._read_queue(account)
            elif backlog.retry_at == inf and not 0 <= now - backlog.tried_at < CONTACT_PAUSE:
                del self._backlogs[account]

    async def _search(self) -> None:
        """Try all accounts with an endpoint, once after the start and then every hour."""
        if 0 <= self._clock.seconds() - self._searched_at < SEARCH_INTERVAL:
            return
        if self._lease is not None and not await self._lease.is_leader():
            return
        after = ""
        while self.running and (page := await self._connections.scan_connections(after, SEARCH_PAGE)):
            for connection in page:
                if self._resolver.resolve_connection(connection):
                    await self._wait_for_room()
                    await self._read_queue(connection.account)
            after = page[-1].account
            await deferLater(self._clock, _SEARCH_PAUSE, lambda: None)
        self._searched_at = self._clock.seconds()

    async def _wait_for_room(self) -> None:
        while self.running and self._delivery.held[1] >= MAX_PENDING_BYTES // 2:
            await deferLater(self._clock, 1.0, lambda: None)
