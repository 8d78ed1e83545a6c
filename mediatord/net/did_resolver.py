"""
Resolves DIDs: locally, from long forms in the store, or by fetching did:web documents (reference 8).

Results are cached; almost every message needs only cached documents.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from ipaddress import ip_address
from typing import Generic, TypeVar

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from mediatord.errors import RateLimitExceeded, UnresolvableDID
from mediatord.net.outbound_http import IPNetwork, OutboundError, OutboundResponse
from mediatord.protocol.canonical_did import canonicalize_did
from mediatord.protocol.didcomm.did_document import DIDDocument
from mediatord.protocol.didcomm.did_methods import (
    DIDPeer4LongFormRequired,
    DIDWebLocation,
    DIDWebLookupRequired,
    locate_did_web,
    parse_did_web_document,
    resolve_local,
    resolve_short_did_peer_4,
)
from mediatord.runtime.failure_logging import redact_failure
from mediatord.runtime.request_time import pause_deadline

_log = Logger()

V = TypeVar("V")

_FETCH_SECONDS = 5.0
_MAX_DOCUMENT_BYTES = 262_144
_POSITIVE_TTL = 300.0
_NEGATIVE_TTL = 30.0
_MAX_CONCURRENT_FETCHES = 64
_BUSY_RETRY_SECONDS = 5
_JSON_TYPES = frozenset((b"", b"application/json"))


class LRUCache(Generic[V]):
    """Least-recently-used cache, bounded in entries and bytes."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._most = self._left = max_bytes
        self._entries: OrderedDict[str, tuple[V, int]] = OrderedDict()

    @property
    def held(self) -> tuple[int, int]:
        """Number of entries, and their bytes."""
        return len(self._entries), self._most - self._left

    def get(self, key: str) -> V | None:
        """The cached value, marked as most recently used."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: str, value: V, size: int) -> None:
        """:param size: approximate memory of the entry in bytes."""
        if key in self._entries:
            self._left += self._entries.pop(key)[1]
        self._entries[key] = (value, size)
        self._left -= size
        while self._entries and (self._left < 0 or len(self._entries) > self._max_entries):
            _, (_, freed) = self._entries.popitem(last=False)
            self._left += freed


class DIDWebResolver:
    """
    Fetches did:web documents. Documents are cached for 5 minutes, failures for 30 seconds; concurrent requests for a
    DID share one fetch.
    """

    def __init__(
        self,
        clock: IReactorTime,
        get: Callable[..., Awaitable[OutboundResponse]],
        charge: Callable[[str], Awaitable[int]],
        *,
        allow_private: Iterable[IPNetwork] = (),
    ) -> None:
        """
        :param get: :meth:`mediatord.net.outbound_http.OutboundHTTPClient.get`.
        :param charge: charges an address for a fetch; returns the seconds to wait, or 0.
        :param allow_private: networks whose addresses may be used in a DID in place of a name.
        """
        self._clock = clock
        self._get = get
        self._charge = charge
        self._allowed = tuple(allow_private)
        self._known: LRUCache[tuple[float, DIDDocument | None]] = LRUCache(1024, 16_777_216)
        self._waiting: dict[str, list[Deferred[DIDDocument | None]]] = {}

    @property
    def held(self) -> tuple[int, int]:
        """Number of cached results, and their bytes."""
        return self._known.held

    async def resolve(self, did: str, peer: str | None) -> DIDDocument:
        """
        Resolve a did:web.

        :param peer: rate limit key of the address that caused the lookup; None is not limited.
        :raise RateLimitExceeded: too many fetches by `peer`, or in progress.
        :raise UnresolvableDID: there is no such document.
        """
        known = self._known.get(did)
        if known is not None and self._clock.seconds() < known[0]:
            document = known[1]
        else:
            document = await self._fetched(did, peer)
        if document is None:
            raise UnresolvableDID
        return document

    async def _fetched(self, did: str, peer: str | None) -> DIDDocument | None:
        """The result of a fetch that is in progress, or of a new one."""
        answer: Deferred[DIDDocument | None] = Deferred()
        if did not in self._waiting:
            location = self._location(did)
            self._refuse_if_busy()
            if peer is not None and (wait := await self._charge(peer)):
                raise RateLimitExceeded(retry_after=wait)
        if did in self._waiting:  # perhaps since the charge
            self._waiting[did].append(answer)
        else:
            self._refuse_if_busy()
            self._waiting[did] = [answer]
            # Independent of the callers (it never fails): one that gives up must not affect the others.
            Deferred.fromCoroutine(self._fetch_and_notify(did, location))
        with pause_deadline(self._clock):
            return await answer

    def _location(self, did: str) -> DIDWebLocation:
        """Location of the document; a host that is an address must be in an allowed network."""
        location = locate_did_web(did)
        last = location.host.rpartition(".")[2].lower()
        if last.isdecimal() or last.startswith("0x"):
            try:
                address = ip_address(location.host)
            except ValueError:
                raise UnresolvableDID from None
            if not any(address in network for network in self._allowed):
                raise UnresolvableDID
        return location

    def _refuse_if_busy(self) -> None:
        if len(self._waiting) >= _MAX_CONCURRENT_FETCHES:
            raise RateLimitExceeded(retry_after=_BUSY_RETRY_SECONDS)

    async def _fetch_and_notify(self, did: str, location: DIDWebLocation) -> None:
        """Fetch, cache the result, and pass it to all waiting callers."""
        try:
            document = await self._fetch(did, location)
        except Exception:  # an internal error must not leave callers waiting
            _log.failure("did:web lookup failed", redact_failure())
            document = None
        lifetime = _NEGATIVE_TTL if document is None else _POSITIVE_TTL
        size = len(did) if document is None else _estimate_size(document)
        self._known.put(did, (self._clock.seconds() + lifetime, document), size)
        for answer in self._waiting.pop(did):
            answer.callback(document)

    async def _fetch(self, did: str, location: DIDWebLocation) -> DIDDocument | None:
        try:
            response = await self._get(location.url, limit=_MAX_DOCUMENT_BYTES, timeout=_FETCH_SECONDS)
            if response.status != 200 or not _is_json_type(response.content_type):
                return None
            return parse_did_web_document(did, response.body)
        except (OutboundError, UnresolvableDID):
            return None


class DIDResolver:
    """Resolver for all supported DID methods."""

    def __init__(
        self,
        web: DIDWebResolver,
        remember: Callable[[str, str], Deferred[None]],
        recall: Callable[[str], Deferred[str | None]],
        *,
        max_entries: int = 4096,
        max_bytes: int = 33_554_432,
    ) -> None:
        """
        :param remember: `remember_did` of the account store.
        :param recall: its `recall_did`.
        :param max_entries: maximum number of cached documents, of `max_bytes` together.
        """
        self._web = web
        self._remember = remember
        self._recall = recall
        self._local: LRUCache[DIDDocument] = LRUCache(max_entries, max_bytes)
        self._remembered: LRUCache[bool] = LRUCache(max_entries, max_bytes)

    @property
    def held(self) -> tuple[int, int]:
        """Number of cached documents and names, and their bytes."""
        entries, sizes = zip(self._web.held, self._local.held, self._remembered.held, strict=True)
        return sum(entries), sum(sizes)

    def resolve(self, did: str, peer: str | None = None) -> Deferred[DIDDocument]:
        """
        Resolve a DID.

        :param peer: rate limit key of the address that caused the lookup.
        :raise UnresolvableDID: it does not resolve.
        :raise UnsupportedDIDMethod: the method is not did:key, did:peer 0/2/4 or did:web.
        :raise RateLimitExceeded: too many lookups for `peer`.
        :raise StoreUnavailable: the long form of a did:peer:4 could not be looked up.
        """
        document = self._local.get(did)
        if document is not None:
            return succeed(document)
        return Deferred.fromCoroutine(self._resolve(did, peer))

    def get_cached(self, did: str) -> DIDDocument | None:
        """The document of a DID that was resolved lately, if that took no lookup."""
        return self._local.get(did)

    def is_remembered(self, did: str) -> bool:
        """Whether :meth:`remember_long_form` would do nothing."""
        return not did.startswith(f"{canonicalize_did(did)}:") or bool(self._remembered.get(did))

    async def remember_long_form(self, did: str) -> None:
        """
        Store the long form of an authenticated did:peer:4, so that its short form resolves from now on (reference
        8.4). Ignores other DIDs.
        """
        if not self.is_remembered(did):
            await self._remember(canonicalize_did(did), did)
            self._remembered.put(did, True, len(did))

    async def _resolve(self, did: str, peer: str | None) -> DIDDocument:
        try:
            document = resolve_local(did)
        except DIDWebLookupRequired:
            return await self._web.resolve(did, peer)
        except DIDPeer4LongFormRequired:
            document = await self._resolve_short_form(did)
        self._local.put(did, document, _estimate_size(document))
        return document

    async def _resolve_short_form(self, short: str) -> DIDDocument:
        long = await self._recall(short)
        if long is None:
            raise UnresolvableDID
        return resolve_short_did_peer_4(short, long)


def _estimate_size(document: DIDDocument) -> int:
    """Approximate size in bytes, dominated by ids, each of which repeats the DID."""
    keys = (*document.key_agreement, *document.authentication)
    strings = [document.did, *document.also_known_as, *(method.id for method in keys)]
    for endpoint in document.endpoints:
        strings += [endpoint.uri, *endpoint.accept, *endpoint.routing_keys]
    return 512 + 512 * len(keys) + sum(64 + len(text) for text in strings)


def _is_json_type(content_type: bytes) -> bool:
    kind = content_type.partition(b";")[0].strip().lower()
    return kind in _JSON_TYPES or kind.endswith(b"+json")
