"""Delivery of messages to HTTP endpoints of accounts without a socket (reference 4.7), and of replies to senders'."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from twisted.internet.defer import CancelledError, Deferred, DeferredList, DeferredSemaphore, ensureDeferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger

from mediatord.didcomm.messages import ForwardWrapper, WrapError
from mediatord.errors import MediatorError
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
# Concurrent POSTs of messages, and likewise of replies.
MAX_CONCURRENT_POSTS = 100
# Messages that may be pending for delivery; others just stay in the queue.
MAX_PENDING_PER_ACCOUNT = 100
MAX_PENDING_BYTES_PER_ACCOUNT = 8_388_608
MAX_PENDING_BYTES = 67_108_864
# The target of a reply is chosen by an unknown sender: few targets, a short timeout, few at once.
MAX_REPLIES_PER_PEER = 4
MAX_REPLY_TARGETS = 2
REPLY_TIMEOUT = 5.0
_ENCRYPTED_MEDIA_TYPE = ENCRYPTED_MEDIA_TYPE.encode("ascii")


class EndpointResolver:
    """
    Finds the endpoints of accounts and of senders.

    :param owns: whether a DID is one of the mediator's.
    :param access: access list; nothing is delivered for denied accounts.
    :param source: where endpoints come from: nowhere, from `endpoints`, or from that and the account's document.
    :param endpoints: account DID to an http(s) URL, or to the DID of another mediator.
    :param own_uris: the mediator's own service URIs, which are never POSTed to.
    """

    def __init__(
        self,
        resolver: DIDResolver,
        owns: Callable[[str], bool],
        access: AccessList,
        *,
        source: Literal["none", "configured", "account-did"],
        endpoints: Mapping[str, str],
        own_uris: frozenset[str],
    ) -> None:
        self._resolver = resolver
        self._owns = owns
        self._access = access
        self._source = source
        self._endpoints = endpoints
        self._own_uris = own_uris

    def resolve_document(self, document: DIDDocument) -> list[ServiceEndpoint]:
        """The http(s) endpoints of a document except the mediator's, in its order of preference."""
        return [endpoint for endpoint in document.http_endpoints() if not self._is_ours(endpoint.uri)]

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

    async def _follow(self, endpoint: ServiceEndpoint) -> list[ServiceEndpoint]:
        uri = endpoint.uri
        if uri.startswith(("http://", "https://")):
            return [] if self._is_ours(uri) else [endpoint]
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

    def _is_ours(self, uri: str) -> bool:
        return uri.rstrip("/") in self._own_uris


class EndpointDelivery:
    """
    POSTs queued messages to the endpoints of their accounts, with retries; the queue keeps them until a 2xx.

    A message that arrives while too much is pending just stays in the queue.
    """

    def __init__(
        self,
        clock: IReactorTime,
        store: IMessageStore,
        targets: EndpointResolver,
        forward_wrapper: ForwardWrapper,
        http_client: OutboundHTTPClient,
        recorder: EventRecorder,
    ) -> None:
        self._clock = clock
        self._store = store
        self._targets = targets
        self._forward_wrapper = forward_wrapper
        self._http_client = http_client
        self._recorder = recorder
        self._under_way: set[Deferred[None]] = set()
        self._ending: set[Deferred[None]] = set()
        self._slots = DeferredSemaphore(MAX_CONCURRENT_POSTS)
        self._waiting: dict[str, tuple[int, int]] = {}
        self._held = 0
        self._replies_for: dict[str, int] = {}

    def enqueue(self, message: StoredMessage) -> None:
        """Begin to deliver a stored message, unless too much is pending for its account."""
        size, account = len(message.payload), message.account
        waiting, held = self._waiting.get(account, (0, 0))
        room = (
            waiting < MAX_PENDING_PER_ACCOUNT
            and held + size <= MAX_PENDING_BYTES_PER_ACCOUNT
            and self._held + size <= MAX_PENDING_BYTES
        )
        if not room:
            return
        self._waiting[account] = waiting + 1, held + size
        self._held += size
        self._begin(self._deliver(message))

    def _release_pending(self, message: StoredMessage) -> None:
        size = len(message.payload)
        waiting, held = self._waiting[message.account]
        self._held -= size
        if waiting > 1:
            self._waiting[message.account] = waiting - 1, held - size
        else:
            del self._waiting[message.account]

    @property
    def held(self) -> tuple[int, int]:
        """Number of pending messages, and their bytes."""
        return sum(waiting for waiting, _ in self._waiting.values()), self._held

    def can_reply(self, document: DIDDocument, peer: str) -> bool:
        """Whether the document has an endpoint, and one more reply may be posted for this rate limit key."""
        return (
            bool(self._targets.resolve_document(document))
            and self._replies_for.get(peer, 0) < MAX_REPLIES_PER_PEER
            and sum(self._replies_for.values()) < MAX_CONCURRENT_POSTS
        )

    def reply(self, document: DIDDocument, body: bytes, peer: str) -> None:
        """Begin to POST a packed reply to an endpoint of a document; one attempt at each, never queued."""
        self._replies_for[peer] = self._replies_for.get(peer, 0) + 1
        self._begin(self._reply(document, body, peer))

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
        try:
            targets = await self._targets.resolve_account(canonicalize_did(message.account))
            pause = INITIAL_BACKOFF
            for attempt in range(MAX_ATTEMPTS if targets else 0):
                if attempt:
                    # The slot is free meanwhile, so that an endpoint that is down delays no other.
                    await deferLater(self._clock, pause, lambda: None)
                    pause = min(pause * 4, MAX_BACKOFF)
                if await self._slots.run(lambda: ensureDeferred(self._post_to_any(targets, message))):
                    return
        finally:
            self._release_pending(message)

    async def _post_to_any(self, targets: Sequence[ServiceEndpoint], message: StoredMessage) -> bool:
        for target in targets:
            if await self._post_to(target, message.payload, message.recipient_did, POST_TIMEOUT):
                await self._end(message)
                return True
        return False

    async def _post_to(
        self, target: ServiceEndpoint, body: bytes, recipient: str, timeout: float, peer: str | None = None
    ) -> bool:
        try:
            packed = await self._forward_wrapper.wrap(body, recipient, target.routing_keys, peer)
            response = await self._http_client.post(target.uri, packed, _ENCRYPTED_MEDIA_TYPE, timeout=timeout)
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

    async def _reply(self, document: DIDDocument, body: bytes, peer: str) -> None:
        try:
            for target in self._targets.resolve_document(document)[:MAX_REPLY_TARGETS]:
                if await self._post_to(target, body, document.did, REPLY_TIMEOUT, peer):
                    return
        finally:
            left = self._replies_for[peer] - 1
            if left:
                self._replies_for[peer] = left
            else:
                del self._replies_for[peer]
