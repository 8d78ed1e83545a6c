"""Delivery of messages to HTTP endpoints of accounts without a socket (reference 4.7), and of replies to senders'."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from posixpath import normpath
from typing import Any, Literal, Protocol
from urllib.parse import unquote, urlsplit

from twisted.internet.defer import CancelledError, Deferred, DeferredList, DeferredSemaphore, ensureDeferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from mediatord.didcomm.messages import ForwardWrapper, WrapError
from mediatord.errors import MediatorError, StoreUnavailable
from mediatord.net.did_resolver import DIDResolver
from mediatord.net.outbound_http import OutboundAddressError, OutboundHTTPClient, OutboundRequestError
from mediatord.observability.event_recorder import EventRecorder
from mediatord.protocol.canonical_did import canonicalize_did
from mediatord.protocol.didcomm.did_document import DIDDocument, ServiceEndpoint, strip_did_url
from mediatord.protocol.didcomm.jwe import ENCRYPTED_MEDIA_TYPE
from mediatord.ratelimit.registration import AccessList
from mediatord.runtime.failure_logging import redact_failure
from mediatord.runtime.request_time import outside_request
from mediatord.store.interfaces.messages import IMessageStore, StoredMessage

_log = Logger()

MAX_ATTEMPTS = 5
INITIAL_BACKOFF = 1.0
MAX_BACKOFF = 60.0
POST_TIMEOUT = 10.0
# Concurrent POSTs of messages of each version of DIDComm, and likewise of replies.
MAX_CONCURRENT_POSTS = 100
# Of them, to one account of DIDComm v1: its wallet alone chooses the target.
MAX_CONCURRENT_POSTS_PER_V1_ACCOUNT = 4
# Messages that may be pending for delivery; others just stay in the queue.
MAX_PENDING_PER_ACCOUNT = 100
MAX_PENDING_BYTES_PER_ACCOUNT = 8_388_608
MAX_PENDING_BYTES = 67_108_864
# The target of a reply is chosen by an unknown sender: few targets, a short timeout, few at once.
MAX_REPLIES_PER_PEER = 4
MAX_REPLY_TARGETS = 2
REPLY_TIMEOUT = 5.0
# Accounts of DIDComm v1 are named so, and some of v2.
V1_ACCOUNT_PREFIX = "did:key:"
_DEFAULT_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}
_ENCRYPTED_MEDIA_TYPE = ENCRYPTED_MEDIA_TYPE.encode("ascii")


class EndpointProtocol(Protocol):
    """How messages get to endpoints in one version of DIDComm."""

    async def resolve_account(self, account: str) -> Sequence[ServiceEndpoint]:
        """The endpoints for messages of an account, best first."""

    async def wrap(
        self, body: bytes, recipient: str, endpoint: ServiceEndpoint, peer: str | None = None
    ) -> tuple[bytes, bytes]:
        """
        What is POSTed to an endpoint, and its media type.

        :param recipient: DID that a packed message is for.
        :param peer: rate limit key for network lookups, if a client causes them.
        :raise WrapError: it cannot be wrapped for the routing keys of the endpoint.
        """


class EndpointResolver:
    """
    Finds the endpoints of accounts and of senders of DIDComm v2, and wraps messages for them.

    :param owns: whether a DID is one of the mediator's.
    :param access: access list; nothing is delivered for denied accounts.
    :param source: where endpoints come from: nowhere, from `endpoints`, or from that and the account's document.
    :param endpoints: account DID to an http(s) URL, or to the DID of another mediator.
    :param own_uris: the mediator's own service URIs, which are never POSTed to.
    """

    def __init__(
        self,
        resolver: DIDResolver,
        forward_wrapper: ForwardWrapper,
        owns: Callable[[str], bool],
        access: AccessList,
        *,
        source: Literal["none", "configured", "account-did"],
        endpoints: Mapping[str, str],
        own_uris: frozenset[str],
    ) -> None:
        self._resolver = resolver
        self._forward_wrapper = forward_wrapper
        self._owns = owns
        self._access = access
        self._source = source
        self._endpoints = endpoints
        self._own_uris = own_uris

    def resolve_document(self, document: DIDDocument) -> list[ServiceEndpoint]:
        """The http(s) endpoints of a document except the mediator's, in its order of preference."""
        return [endpoint for endpoint in document.http_endpoints() if not self._is_ours(endpoint)]

    async def resolve_account(self, account: str) -> list[ServiceEndpoint]:
        """The endpoints for messages of an account, best first."""
        if self._access.denies(account):
            return []
        endpoints: Sequence[ServiceEndpoint] = ()
        if account in self._endpoints:
            endpoints = [ServiceEndpoint(self._endpoints[account])]
        elif self._source == "account-did" and (document := await self._resolve(account)):
            endpoints = document.endpoints
        return [target for endpoint in endpoints for target in await self._follow(endpoint)]

    async def wrap(
        self, body: bytes, recipient: str, endpoint: ServiceEndpoint, peer: str | None = None
    ) -> tuple[bytes, bytes]:
        """
        A message in a forward for each routing key of an endpoint, and its media type.

        :raise WrapError: see :meth:`~mediatord.didcomm.messages.ForwardWrapper.wrap`.
        """
        wrapped = await self._forward_wrapper.wrap(body, recipient, endpoint.routing_keys, peer)
        return wrapped, _ENCRYPTED_MEDIA_TYPE

    async def _follow(self, endpoint: ServiceEndpoint) -> list[ServiceEndpoint]:
        uri = endpoint.uri
        if uri.startswith(("http://", "https://")):
            return [] if self._is_ours(endpoint) else [endpoint]
        if not uri.startswith("did:") or self._owns(strip_did_url(uri)):
            return []
        # One hop only: the document of a mediator names real transports (Routing 2.0, "Using a DID as an endpoint").
        document = await self._resolve(strip_did_url(uri))
        if document is None:
            return []
        return [
            replace(target, routing_keys=(strip_did_url(uri), *endpoint.routing_keys))
            for target in self.resolve_document(document)
        ]

    async def _resolve(self, did: str) -> DIDDocument | None:
        try:
            return await self._resolver.resolve(did)
        except MediatorError:
            return None

    def _is_ours(self, endpoint: ServiceEndpoint) -> bool:
        """Whether what is posted to an endpoint would come back, to be posted again."""
        keys = endpoint.routing_keys
        return is_listed_uri(endpoint.uri, self._own_uris) or any(self._owns(strip_did_url(key)) for key in keys)


def is_listed_uri(uri: str, listed: frozenset[str]) -> bool:
    """Whether a URI names the same resource as one of a list, however its host, port and path are spelled."""
    wanted = _normalize_uri(uri)
    return any(_normalize_uri(one) == wanted for one in listed)


def _normalize_uri(uri: str) -> tuple[str, int | None, str]:
    """Host, port and path; the port is None if it is that of the scheme, as a host has one server for both."""
    try:
        parts = urlsplit(uri)
        port = None if parts.port == _DEFAULT_PORTS.get(parts.scheme) else parts.port
    except ValueError:
        return "", None, uri
    return (parts.hostname or "").rstrip("."), port, normpath("/" + unquote(parts.path).lstrip("/"))


class EndpointDelivery:
    """
    POSTs queued messages to the endpoints of their accounts, with retries; the queue keeps them until a 2xx.

    A message that arrives while too much is pending just stays in the queue.

    :param targets: endpoints of DIDComm v2.
    """

    def __init__(
        self,
        clock: IReactorTime,
        store: IMessageStore,
        targets: EndpointResolver,
        http_client: OutboundHTTPClient,
        recorder: EventRecorder,
    ) -> None:
        self._clock = clock
        self._store = store
        self._targets = targets
        self._v1: EndpointProtocol | None = None
        self._http_client = http_client
        self._recorder = recorder
        self._under_way: set[Deferred[None]] = set()
        self._ending: set[Deferred[None]] = set()
        self._slots = DeferredSemaphore(MAX_CONCURRENT_POSTS)
        self._v1_slots = DeferredSemaphore(MAX_CONCURRENT_POSTS)
        self._pauses: dict[str, set[IDelayedCall]] = {}
        self._v1_account_slots: dict[str, DeferredSemaphore] = {}
        self._waiting: dict[str, tuple[int, int]] = {}
        self._held = 0
        self._delivering: set[str] = set()
        self._on_end: Callable[[str, bool], None] = lambda account, is_delivered: None
        self._replies_for: dict[str, int] = {}

    def add_v1(self, targets: EndpointProtocol, on_end: Callable[[str, bool], None]) -> None:
        """
        Deliver to endpoints of DIDComm v1, too, which only accounts named by a did:key have.

        :param on_end: called whenever a message for an account with such an endpoint was delivered, or stays in the
            queue: with the account, and whether it was delivered.
        """
        self._v1, self._on_end = targets, on_end

    def enqueue(self, message: StoredMessage) -> None:
        """Begin to deliver a stored message, unless it is being delivered, or too much is pending for its account."""
        size, account = len(message.payload), message.account
        waiting, held = self._waiting.get(account, (0, 0))
        room = (
            waiting < MAX_PENDING_PER_ACCOUNT
            and held + size <= MAX_PENDING_BYTES_PER_ACCOUNT
            and self._held + size <= MAX_PENDING_BYTES
        )
        if message.id in self._delivering:
            return
        if not room:
            if self._may_have_v1_endpoint(account):
                self._on_end(account, False)
            return
        self._delivering.add(message.id)
        self._waiting[account] = waiting + 1, held + size
        self._held += size
        self._begin(self._deliver(message))

    def _release_pending(self, message: StoredMessage) -> None:
        self._delivering.discard(message.id)
        size = len(message.payload)
        waiting, held = self._waiting[message.account]
        self._held -= size
        if waiting > 1:
            self._waiting[message.account] = waiting - 1, held - size
        else:
            del self._waiting[message.account]
            self._v1_account_slots.pop(message.account, None)

    def is_delivering(self, account: str) -> bool:
        """Whether messages of an account are pending."""
        return account in self._waiting

    @property
    def held(self) -> tuple[int, int]:
        """Number of pending messages, and their bytes."""
        return len(self._delivering), self._held

    def can_reply(self, document: DIDDocument, peer: str) -> bool:
        """Whether the document has an endpoint, and one more reply may be posted for this rate limit key."""
        return bool(self._targets.resolve_document(document)) and self.has_room_for_reply(peer, MAX_REPLIES_PER_PEER)

    def has_room_for_reply(self, peer: str, limit: int) -> bool:
        """Whether one more reply may be posted for a rate limit key. :param limit: of that key."""
        return self._replies_for.get(peer, 0) < limit and sum(self._replies_for.values()) < MAX_CONCURRENT_POSTS

    def reply(self, document: DIDDocument, body: bytes, peer: str) -> None:
        """Begin to POST a packed reply to an endpoint of a document; one attempt at each, never queued."""
        self.post_reply(self._targets, self._targets.resolve_document(document), document.did, body, peer)

    def post_reply(
        self, protocol: EndpointProtocol, targets: Sequence[ServiceEndpoint], recipient: str, body: bytes, peer: str
    ) -> None:
        """
        As :meth:`reply`, for either version of DIDComm.

        :param targets: endpoints, of which two are tried.
        :param recipient: DID that the packed reply is for.
        """
        self._replies_for[peer] = self._replies_for.get(peer, 0) + 1
        self._begin(self._reply(protocol, targets[:MAX_REPLY_TARGETS], recipient, body, peer))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        with outside_request():
            begun: Deferred[None] = Deferred.fromCoroutine(work)
        self._under_way.add(begun)
        begun.addErrback(lambda failure: failure.trap(CancelledError))
        begun.addErrback(lambda failure: _log.failure("delivery to an endpoint failed", redact_failure(failure)))
        begun.addBoth(lambda _: self._under_way.discard(begun))

    def stop(self) -> Deferred[Any]:
        """Cancel pending deliveries; fires when delivered messages are removed and recorded."""
        for work in tuple(self._under_way):
            work.cancel()
        return DeferredList(list(self._ending))

    async def _deliver(self, message: StoredMessage) -> None:
        protocol: EndpointProtocol = self._targets
        try:
            account, is_delivered, targets = canonicalize_did(message.account), False, None
            with suppress(StoreUnavailable):
                if self._v1 is not None and self._may_have_v1_endpoint(account):
                    protocol = self._v1
                    targets = await protocol.resolve_account(account)
                if not targets:
                    protocol = self._targets
                    targets = await protocol.resolve_account(account)
                is_delivered = await self._try_repeatedly(protocol, targets, message)
        finally:
            self._release_pending(message)
        if protocol is self._v1:
            self._on_end(account, is_delivered)

    def _may_have_v1_endpoint(self, account: str) -> bool:
        return self._v1 is not None and account.startswith(V1_ACCOUNT_PREFIX)

    async def _try_repeatedly(
        self, protocol: EndpointProtocol, targets: Sequence[ServiceEndpoint], message: StoredMessage
    ) -> bool:
        """Whether the message is no longer in the queue."""
        pause = INITIAL_BACKOFF
        for attempt in range(MAX_ATTEMPTS if targets else 0):
            if attempt:
                # The slot is free meanwhile, so that an endpoint that is down delays no other.
                await self._pause(message.account, pause)
                pause = min(pause * 4, MAX_BACKOFF)
                with suppress(StoreUnavailable):
                    if not await self._store.find_messages([message.id]):
                        return True  # it was picked up, or has expired
            post = partial(self._post_to_any, protocol, targets, message)
            if await self._take_slot(protocol, message.account, post):
                return True
        return False

    async def _pause(self, account: str, seconds: float) -> None:
        """Wait before the next attempt."""
        done: Deferred[None] = Deferred(lambda _: call.cancel())
        call = self._clock.callLater(seconds, done.callback, None)
        self._pauses.setdefault(account, set()).add(call)
        try:
            await done
        finally:
            self._pauses[account].discard(call)
            if not self._pauses[account]:
                del self._pauses[account]

    def retry_now(self, account: str) -> None:
        """End the pauses before the next attempts for an account."""
        for call in self._pauses.get(account, ()):
            call.reset(0)

    def _take_slot(
        self, protocol: EndpointProtocol, account: str, post: Callable[[], Coroutine[Any, Any, bool]]
    ) -> Deferred[bool]:
        """Run `post` once there are few enough others."""
        if protocol is not self._v1:
            return self._slots.run(lambda: ensureDeferred(post()))
        own = self._v1_account_slots.setdefault(account, DeferredSemaphore(MAX_CONCURRENT_POSTS_PER_V1_ACCOUNT))
        return own.run(lambda: self._v1_slots.run(lambda: ensureDeferred(post())))

    async def _post_to_any(
        self, protocol: EndpointProtocol, targets: Sequence[ServiceEndpoint], message: StoredMessage
    ) -> bool:
        for target in targets:
            if await self._post_to(protocol, target, message.payload, message.recipient_did, POST_TIMEOUT):
                await self._end(message)
                return True
        return False

    async def _post_to(
        self,
        protocol: EndpointProtocol,
        target: ServiceEndpoint,
        body: bytes,
        recipient: str,
        timeout: float,
        peer: str | None = None,
    ) -> bool:
        try:
            packed, media_type = await protocol.wrap(body, recipient, target, peer)
            response = await self._http_client.post(target.uri, packed, media_type, timeout=timeout)
        except (OutboundRequestError, OutboundAddressError, WrapError):
            return False
        return 200 <= response.status < 300

    def _end(self, message: StoredMessage) -> Deferred[None]:
        """Remove and record a delivered message, which is completed even if the caller is cancelled."""
        done: Deferred[None] = Deferred()
        ending: Deferred[None] = Deferred.fromCoroutine(self._remove(message))
        self._ending.add(ending)
        ending.addErrback(lambda failure: _log.failure("delivery to an endpoint failed", redact_failure(failure)))
        ending.addBoth(lambda _: self._ending.discard(ending))
        ending.addBoth(done.callback)
        return done

    async def _remove(self, message: StoredMessage) -> None:
        for removed in await self._store.remove_messages([message.id]):
            self._recorder.record_acknowledgement(removed, "http", "didcomm")

    async def _reply(
        self, protocol: EndpointProtocol, targets: Sequence[ServiceEndpoint], recipient: str, body: bytes, peer: str
    ) -> None:
        try:
            for target in targets:
                if await self._post_to(protocol, target, body, recipient, REPLY_TIMEOUT, peer):
                    return
        finally:
            left = self._replies_for[peer] - 1
            if left:
                self._replies_for[peer] = left
            else:
                del self._replies_for[peer]
