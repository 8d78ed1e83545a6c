"""DID resolution with its caches, remembered long forms, and limits (reference 8.1, 8.4 and 8.5)."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, fail, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import RateLimitExceeded, StoreUnavailable, UnresolvableDID, UnsupportedDIDMethod
from mediatord.net.did_resolver import DIDResolver, DIDWebResolver, LRUCache
from mediatord.net.outbound_http import OutboundAddressError, OutboundRequestError, OutboundResponse
from mediatord.protocol import encoding
from mediatord.protocol.didcomm.did_document import DIDDocument
from mediatord.protocol.didcomm.did_methods import make_did_peer_2
from mediatord.protocol.didcomm.keys import PrivateKey
from mediatord.ratelimit.rate_limiter import SlidingWindowLimiter, resolve_wait
from mediatord.runtime.request_time import REQUEST_TIME_LIMIT, get_time_left, request_deadline
from tests.did_factories import make_did_key, make_did_peer_4

KEY = PrivateKey.from_secret("X25519", b"\x31" * 32).public
WEB = "did:web:example.com"
METHOD = {"id": "#k", "type": "Multikey", "publicKeyMultibase": KEY.multibase()}
LONG, SHORT = make_did_peer_4({"keyAgreement": [METHOD]})


class FakeOutbound:
    """Replaces `Outbound.get`: records requests, which the test answers."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, int, float]] = []
        self.waiting: list[Deferred[OutboundResponse]] = []

    async def get(self, url: str, *, limit: int, timeout: float) -> OutboundResponse:
        self.requests.append((url, limit, timeout))
        answer: Deferred[OutboundResponse] = Deferred()
        self.waiting.append(answer)
        return await answer

    def respond(self, response: OutboundResponse | Exception) -> None:
        """Answer the oldest pending request."""
        waiting = self.waiting.pop(0)
        if isinstance(response, Exception):
            waiting.errback(response)
        else:
            waiting.callback(response)


def document_response(
    did: str = WEB, *, status: int = 200, content_type: bytes = b"application/did+json; charset=utf-8"
) -> OutboundResponse:
    """A response with a document of `did` with one key."""
    return OutboundResponse(status, content_type, encoding.dumps({"id": did, "keyAgreement": [METHOD]}))


class ResolverTestCase(SynchronousTestCase):
    """Resolver on fakes of the outbound client and the store."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(1_800_000_000)
        self.web = FakeOutbound()
        self.remembered: list[tuple[str, str]] = []
        self.store: dict[str, str] = {}
        self.available = True
        self.charging: Deferred[None] | None = None
        self.resolver = self.build_resolver()

    def build_resolver(self, *, allow_private: Any = (), **limits: int) -> DIDResolver:
        """Build a resolver that allows 3 lookups a minute per peer address."""
        lookups = SlidingWindowLimiter(3)

        async def charge(peer: str) -> int:
            if self.charging is not None:
                await self.charging
            return await resolve_wait(lookups.admit(peer, self.clock.seconds()))

        web = DIDWebResolver(self.clock, self.web.get, charge, allow_private=allow_private)
        resolver = DIDResolver(web, self.remember, self.recall, **limits)
        return resolver

    def keep(self, did: str) -> None:
        """Have the resolver remember a DID, successfully."""
        self.successResultOf(Deferred.fromCoroutine(self.resolver.remember_long_form(did)))

    def remember(self, short: str, long: str) -> Deferred[None]:
        """Fake `remember_did` of the account store."""
        if not self.available:
            return fail(StoreUnavailable())
        self.remembered.append((short, long))
        self.store[short] = long
        return succeed(None)

    def recall(self, short: str) -> Deferred[str | None]:
        """Fake `recall_did` of the account store."""
        return succeed(self.store.get(short)) if self.available else fail(StoreUnavailable())


class LocalTests(ResolverTestCase):
    """DIDs that need no network."""

    def test_local_methods(self) -> None:
        """did:key and did:peer:2 resolve at once, to the same document each time."""
        for did in (make_did_key(KEY), make_did_peer_2([("E", KEY)], [])):
            document = self.successResultOf(self.resolver.resolve(did))
            self.assertEqual((document.did, document.key_agreement[0].key), (did, KEY))
            self.assertIs(self.successResultOf(self.resolver.resolve(did)), document)
        self.assertEqual(self.web.requests, [])

    def test_failures(self) -> None:
        """A malformed DID is unresolvable, one of another method unsupported (reference 8.1)."""
        self.failureResultOf(self.resolver.resolve("did:key:z6Mk"), UnresolvableDID)
        self.failureResultOf(self.resolver.resolve("no did"), UnresolvableDID)
        self.failureResultOf(self.resolver.resolve("did:prism:abc"), UnsupportedDIDMethod)

    def test_long_form_is_remembered(self) -> None:
        """An authenticated long form is stored once; then the short form resolves (8.4)."""
        self.successResultOf(self.resolver.resolve(LONG))
        self.failureResultOf(self.resolver.resolve(SHORT), UnresolvableDID)
        for did in (LONG, LONG, SHORT, make_did_key(KEY)):
            self.keep(did)
        self.assertEqual(self.remembered, [(SHORT, LONG)])
        document = self.successResultOf(self.resolver.resolve(SHORT))
        self.assertEqual(document.did, SHORT)
        self.assertEqual(document.key_agreement[0].id, f"{SHORT}#k")

    def test_stored_long_form_survives_restart(self) -> None:
        """A short form resolves after a restart, from the store (8.4)."""
        self.keep(LONG)
        self.assertEqual(self.successResultOf(self.build_resolver().resolve(SHORT)).did, SHORT)

    def test_wrong_long_form(self) -> None:
        """A long form that does not match the short one is refused, wherever it comes from."""
        self.store[SHORT] = make_did_peer_4({})[0]
        self.failureResultOf(self.resolver.resolve(SHORT), UnresolvableDID)

    def test_store_unavailable(self) -> None:
        """Without the store nothing is remembered or recalled; both work once it is back."""
        self.available = False
        self.failureResultOf(Deferred.fromCoroutine(self.resolver.remember_long_form(LONG)), StoreUnavailable)
        self.failureResultOf(self.resolver.resolve(SHORT), StoreUnavailable)
        self.available = True
        self.keep(LONG)
        self.successResultOf(self.resolver.resolve(SHORT))
        self.assertEqual(self.remembered, [(SHORT, LONG)])

    def test_cache_is_bounded(self) -> None:
        """Documents are bounded in number and bytes; the least recently used is evicted."""
        others = [make_did_peer_4({"n": n})[0] for n in range(2)]
        for limits in ({"max_entries": 2}, {"max_bytes": 2500}):
            resolver = self.build_resolver(**limits)
            first = {did: self.successResultOf(resolver.resolve(did)) for did in (LONG, others[0])}
            self.assertIs(self.successResultOf(resolver.resolve(LONG)), first[LONG])
            self.successResultOf(resolver.resolve(others[1]))
            self.assertIs(self.successResultOf(resolver.resolve(LONG)), first[LONG])
            self.assertIsNot(self.successResultOf(resolver.resolve(others[0])), first[others[0]])


class WebTests(ResolverTestCase):
    """did:web."""

    def resolve_from_web(self, did: str = WEB) -> DIDDocument:
        """Resolve, with the fake web answering."""
        resolving = self.resolver.resolve(did)
        self.web.respond(document_response(did))
        return self.successResultOf(resolving)

    def test_fetch(self) -> None:
        """The document is fetched from the DID's location, within 5 s and 256 KiB (8.5)."""
        document = self.resolve_from_web("did:web:example.com%3A8443:a")
        self.assertEqual(self.web.requests, [("https://example.com:8443/a/did.json", 262_144, 5.0)])
        self.assertEqual(document.key_agreement[0].id, "did:web:example.com%3A8443:a#k")

    def test_document_is_cached_for_five_minutes(self) -> None:
        """A document is cached for 5 minutes."""
        document = self.resolve_from_web()
        self.clock.advance(299)
        self.assertIs(self.successResultOf(self.resolver.resolve(WEB)), document)
        self.clock.advance(1)
        self.resolve_from_web()
        self.assertEqual(len(self.web.requests), 2)

    def test_failure_is_cached_for_thirty_seconds(self) -> None:
        """A failure is cached for 30 seconds."""
        resolving = self.resolver.resolve(WEB)
        self.web.respond(OutboundRequestError())
        self.failureResultOf(resolving, UnresolvableDID)
        self.clock.advance(29)
        self.failureResultOf(self.resolver.resolve(WEB), UnresolvableDID)
        self.assertEqual(len(self.web.requests), 1)
        self.clock.advance(1)
        self.resolve_from_web()

    def test_invalid_responses(self) -> None:
        """Another status, type, or DID, invalid JSON, or no response: unresolvable (8.5)."""
        answers: list[OutboundResponse | Exception] = [
            document_response(status=404),
            document_response(status=302),
            document_response(content_type=b"text/html"),
            document_response("did:web:other.example"),
            OutboundResponse(200, b"application/json", b"<html>"),
            OutboundAddressError(),
            OutboundRequestError(),
        ]
        for answer in answers:
            resolving = self.build_resolver().resolve(WEB)
            self.web.respond(answer)
            self.failureResultOf(resolving, UnresolvableDID)

    def test_content_types(self) -> None:
        """Any JSON type, or none."""
        for n, kind in enumerate((b"", b"application/json", b"Application/DID+LD+JSON;x=y")):
            did = f"{WEB}:{n}"
            resolving = self.resolver.resolve(did)
            self.web.respond(document_response(did, content_type=kind))
            self.successResultOf(resolving)

    def test_concurrent_lookups_share_fetch(self) -> None:
        """Lookups during a fetch wait for it; one that is cancelled does not affect others."""
        first, second, third = (self.resolver.resolve(WEB, f"192.0.2.{n}") for n in range(3))
        first.cancel()
        self.failureResultOf(first, CancelledError)
        self.web.respond(document_response())
        self.assertIs(self.successResultOf(second), self.successResultOf(third))
        self.assertEqual(len(self.web.requests), 1)

    def test_fetch_does_not_use_store_deadline(self) -> None:
        """Requests that wait for a fetch have their whole store deadline afterwards."""
        left: list[float] = []

        async def request() -> None:
            with request_deadline(self.clock):
                await self.resolver.resolve(WEB)
                left.append(get_time_left(self.clock))

        first = Deferred.fromCoroutine(request())
        self.clock.advance(4.0)
        second = Deferred.fromCoroutine(request())
        self.clock.advance(0.5)
        self.web.respond(document_response())
        for item in (first, second):
            self.successResultOf(item)
        self.assertEqual(left, [REQUEST_TIME_LIMIT, REQUEST_TIME_LIMIT])

    def test_lookups_while_charging_share_fetch(self) -> None:
        """While one lookup waits for its charge, others may begin, up to the limit."""
        self.charging = Deferred()
        asking = [self.resolver.resolve(WEB, f"192.0.2.{n}") for n in range(3)]
        other = self.resolver.resolve(f"{WEB}:other", "192.0.2.9")
        self.assertEqual(self.web.requests, [])
        for n in range(63):
            self.resolver.resolve(f"{WEB}:{n}")
        self.charging.callback(None)
        self.assertEqual(len(self.web.requests), 64)
        self.failureResultOf(other, RateLimitExceeded)
        for n in range(63):
            self.web.respond(document_response(f"{WEB}:{n}"))
        self.web.respond(document_response())
        documents = [self.successResultOf(item) for item in asking]
        self.assertIs(documents[0], documents[2])

    def test_limit_per_peer(self) -> None:
        """Fetches are limited per peer address and minute; cached documents are free (8.5)."""
        for n in range(3):
            self.resolver.resolve(f"{WEB}:{n}", "192.0.2.1")
        refused = self.failureResultOf(self.resolver.resolve(f"{WEB}:3", "192.0.2.1"), RateLimitExceeded).value
        self.assertEqual(refused.retry_after, 60)
        self.assertNoResult(self.resolver.resolve(f"{WEB}:0", "192.0.2.1"))
        self.assertNoResult(self.resolver.resolve(f"{WEB}:3", "192.0.2.2"))
        self.assertNoResult(self.resolver.resolve(f"{WEB}:4"))
        self.assertEqual(len(self.web.requests), 5)
        self.clock.advance(60)
        self.assertNoResult(self.resolver.resolve(f"{WEB}:5", "192.0.2.1"))

    def test_limit_of_concurrent_fetches(self) -> None:
        """No more than 64 fetches at a time."""
        first, *_ = [self.resolver.resolve(f"{WEB}:{n}") for n in range(64)]
        self.assertNoResult(first)
        self.failureResultOf(self.resolver.resolve(f"{WEB}:64"), RateLimitExceeded)
        self.web.respond(OutboundRequestError())
        self.failureResultOf(first, UnresolvableDID)
        self.assertNoResult(self.resolver.resolve(f"{WEB}:64"))

    def test_malformed_did(self) -> None:
        """A DID without a location costs no lookup."""
        for n in range(9):
            did = f"did:web:example.com%3A0:{n}"
            self.failureResultOf(self.resolver.resolve(did, "192.0.2.1"), UnresolvableDID)
        self.assertEqual(self.web.requests, [])

    def test_addresses_as_hosts(self) -> None:
        """An address as host is refused, unless in an allowed network (8.5)."""
        hosts = ("127.0.0.1", "127.1", "2130706433", "0x7f.1", "0x7f000001", "1.1.1.1", "127.0.0.1%3A8443")
        for host in hosts:
            self.failureResultOf(self.resolver.resolve(f"did:web:{host}"), UnresolvableDID)
        self.resolver = self.build_resolver(allow_private=[ip_network("127.0.0.0/8")])
        for host in hosts[1:-1]:
            self.failureResultOf(self.resolver.resolve(f"did:web:{host}"), UnresolvableDID)
        self.assertEqual(self.web.requests, [])
        self.resolve_from_web("did:web:127.0.0.1%3A8443")
        self.assertEqual(self.web.requests[0][0], "https://127.0.0.1:8443/.well-known/did.json")

    def test_internal_error(self) -> None:
        """An internal error is logged, waiting lookups fail, and the next one tries again."""
        resolving = self.resolver.resolve(WEB)
        self.web.respond(ZeroDivisionError())
        self.failureResultOf(resolving, UnresolvableDID)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.clock.advance(30)
        self.resolve_from_web()


class LRUCacheTests(SynchronousTestCase):
    """:class:`LRUCache`."""

    def test_replaces_value(self) -> None:
        """A new value replaces the size of the old one."""
        recent: LRUCache[int] = LRUCache(10, 100)
        for n in range(5):
            recent.put("a", n, 60)
        self.assertEqual(recent.get("a"), 4)
        recent.put("b", 5, 40)
        self.assertEqual((recent.get("a"), recent.get("b")), (4, 5))

    def test_oversized_value(self) -> None:
        """A value over the limit is not cached, and evicts nothing."""
        recent: LRUCache[int] = LRUCache(10, 100)
        recent.put("a", 1, 101)
        self.assertIsNone(recent.get("a"))
        recent.put("b", 2, 100)
        self.assertEqual(recent.get("b"), 2)
