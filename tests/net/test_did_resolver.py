"""Resolution with its caches, its memory of long forms, and its limits (reference 8.1, 8.4 and 8.5)."""

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


class Web:
    """What plays `Outbound.get`: notes each request, and answers when a test says so."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, int, float]] = []
        self.waiting: list[Deferred[OutboundResponse]] = []

    async def get(self, url: str, *, limit: int, timeout: float) -> OutboundResponse:
        self.requests.append((url, limit, timeout))
        answer: Deferred[OutboundResponse] = Deferred()
        self.waiting.append(answer)
        return await answer

    def answer(self, response: OutboundResponse | Exception) -> None:
        """Answer the oldest request that waits."""
        waiting = self.waiting.pop(0)
        if isinstance(response, Exception):
            waiting.errback(response)
        else:
            waiting.callback(response)


def a_response(
    did: str = WEB, *, status: int = 200, content_type: bytes = b"application/did+json; charset=utf-8"
) -> OutboundResponse:
    """A document of `did` with one key."""
    return OutboundResponse(status, content_type, encoding.dumps({"id": did, "keyAgreement": [METHOD]}))


class ResolverTestCase(SynchronousTestCase):
    """A resolver on a :class:`Web` and a store that are played."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(1_800_000_000)
        self.web = Web()
        self.remembered: list[tuple[str, str]] = []
        self.store: dict[str, str] = {}
        self.available = True
        self.charging: Deferred[None] | None = None
        self.resolver = self.a_resolver()

    def a_resolver(self, *, allow_private: Any = (), **limits: int) -> DIDResolver:
        """One that allows 3 lookups in a minute for each peer address."""
        lookups = SlidingWindowLimiter(3)

        async def charge(peer: str) -> int:
            if self.charging is not None:
                await self.charging
            return await resolve_wait(lookups.admit(peer, self.clock.seconds()))

        web = DIDWebResolver(self.clock, self.web.get, charge, allow_private=allow_private)
        resolver = DIDResolver(web, self.remember, self.recall, **limits)
        return resolver

    def keep(self, did: str) -> None:
        """Have the resolver remember, which has to go well."""
        self.successResultOf(Deferred.fromCoroutine(self.resolver.remember_long_form(did)))

    def remember(self, short: str, long: str) -> Deferred[None]:
        """`remember_did` of the account store."""
        if not self.available:
            return fail(StoreUnavailable())
        self.remembered.append((short, long))
        self.store[short] = long
        return succeed(None)

    def recall(self, short: str) -> Deferred[str | None]:
        """`recall_did` of the account store."""
        return succeed(self.store.get(short)) if self.available else fail(StoreUnavailable())


class LocalTests(ResolverTestCase):
    """DIDs that need no network."""

    def test_local_methods(self) -> None:
        """did:key and did:peer:2 resolve at once, and to the same document each time."""
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
        """Once its holder has proven itself a long form is kept, once; then the short form resolves (8.4)."""
        self.successResultOf(self.resolver.resolve(LONG))
        self.failureResultOf(self.resolver.resolve(SHORT), UnresolvableDID)
        for did in (LONG, LONG, SHORT, make_did_key(KEY)):
            self.keep(did)
        self.assertEqual(self.remembered, [(SHORT, LONG)])
        document = self.successResultOf(self.resolver.resolve(SHORT))
        self.assertEqual(document.did, SHORT)
        self.assertEqual(document.key_agreement[0].id, f"{SHORT}#k")

    def test_memory_survives_the_resolver(self) -> None:
        """A short form resolves after a restart, since the store has kept the long one (8.4)."""
        self.keep(LONG)
        self.assertEqual(self.successResultOf(self.a_resolver().resolve(SHORT)).did, SHORT)

    def test_wrong_memory(self) -> None:
        """A long form that does not belong to the short one is not believed, wherever it comes from."""
        self.store[SHORT] = make_did_peer_4({})[0]
        self.failureResultOf(self.resolver.resolve(SHORT), UnresolvableDID)

    def test_store_unavailable(self) -> None:
        """Without the store nothing is kept or recalled, and both work once the store is back."""
        self.available = False
        self.failureResultOf(Deferred.fromCoroutine(self.resolver.remember_long_form(LONG)), StoreUnavailable)
        self.failureResultOf(self.resolver.resolve(SHORT), StoreUnavailable)
        self.available = True
        self.keep(LONG)
        self.successResultOf(self.resolver.resolve(SHORT))
        self.assertEqual(self.remembered, [(SHORT, LONG)])

    def test_bounded(self) -> None:
        """Only so many documents are kept, and only in so many bytes; the one unused for longest goes first."""
        others = [make_did_peer_4({"n": n})[0] for n in range(2)]
        for limits in ({"max_entries": 2}, {"max_bytes": 2500}):
            resolver = self.a_resolver(**limits)
            first = {did: self.successResultOf(resolver.resolve(did)) for did in (LONG, others[0])}
            self.assertIs(self.successResultOf(resolver.resolve(LONG)), first[LONG])
            self.successResultOf(resolver.resolve(others[1]))
            self.assertIs(self.successResultOf(resolver.resolve(LONG)), first[LONG])
            self.assertIsNot(self.successResultOf(resolver.resolve(others[0])), first[others[0]])


class WebTests(ResolverTestCase):
    """did:web."""

    def found(self, did: str = WEB) -> DIDDocument:
        """Resolve, with the web answering."""
        resolving = self.resolver.resolve(did)
        self.web.answer(a_response(did))
        return self.successResultOf(resolving)

    def test_fetch(self) -> None:
        """The document comes from where the DID says, within 5 s and 256 KiB (8.5)."""
        document = self.found("did:web:example.com%3A8443:a")
        self.assertEqual(self.web.requests, [("https://example.com:8443/a/did.json", 262_144, 5.0)])
        self.assertEqual(document.key_agreement[0].id, "did:web:example.com%3A8443:a#k")

    def test_kept_for_five_minutes(self) -> None:
        """A document is kept for 5 minutes."""
        document = self.found()
        self.clock.advance(299)
        self.assertIs(self.successResultOf(self.resolver.resolve(WEB)), document)
        self.clock.advance(1)
        self.found()
        self.assertEqual(len(self.web.requests), 2)

    def test_failure_is_kept_for_thirty_seconds(self) -> None:
        """A failure is kept for 30 seconds."""
        resolving = self.resolver.resolve(WEB)
        self.web.answer(OutboundRequestError())
        self.failureResultOf(resolving, UnresolvableDID)
        self.clock.advance(29)
        self.failureResultOf(self.resolver.resolve(WEB), UnresolvableDID)
        self.assertEqual(len(self.web.requests), 1)
        self.clock.advance(1)
        self.found()

    def test_what_is_no_document(self) -> None:
        """Another status, another type, another DID's document, no JSON, or no answer: unresolvable (8.5)."""
        answers: list[OutboundResponse | Exception] = [
            a_response(status=404),
            a_response(status=302),
            a_response(content_type=b"text/html"),
            a_response("did:web:other.example"),
            OutboundResponse(200, b"application/json", b"<html>"),
            OutboundAddressError(),
            OutboundRequestError(),
        ]
        for answer in answers:
            resolving = self.a_resolver().resolve(WEB)
            self.web.answer(answer)
            self.failureResultOf(resolving, UnresolvableDID)

    def test_json_types(self) -> None:
        """Any JSON type will do, and none at all."""
        for n, kind in enumerate((b"", b"application/json", b"Application/DID+LD+JSON;x=y")):
            did = f"{WEB}:{n}"
            resolving = self.resolver.resolve(did)
            self.web.answer(a_response(did, content_type=kind))
            self.successResultOf(resolving)

    def test_concurrent_lookups_share_a_fetch(self) -> None:
        """Whoever asks during a fetch waits for it; that one gives up is nothing to the others."""
        first, second, third = (self.resolver.resolve(WEB, f"192.0.2.{n}") for n in range(3))
        first.cancel()
        self.failureResultOf(first, CancelledError)
        self.web.answer(a_response())
        self.assertIs(self.successResultOf(second), self.successResultOf(third))
        self.assertEqual(len(self.web.requests), 1)

    def test_takes_no_time_of_the_store(self) -> None:
        """However long a fetch takes, all requests that wait for it may ask the store for as long as before."""
        left: list[float] = []

        async def request() -> None:
            with request_deadline(self.clock):
                await self.resolver.resolve(WEB)
                left.append(get_time_left(self.clock))

        first = Deferred.fromCoroutine(request())
        self.clock.advance(4.0)
        second = Deferred.fromCoroutine(request())
        self.clock.advance(0.5)
        self.web.answer(a_response())
        for one in (first, second):
            self.successResultOf(one)
        self.assertEqual(left, [REQUEST_TIME_LIMIT, REQUEST_TIME_LIMIT])

    def test_concurrent_charges_share_a_fetch(self) -> None:
        """While it is found out whether they may, others may begin, or be as many as are possible at a time."""
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
            self.web.answer(a_response(f"{WEB}:{n}"))
        self.web.answer(a_response())
        documents = [self.successResultOf(one) for one in asking]
        self.assertIs(documents[0], documents[2])

    def test_limit_per_peer(self) -> None:
        """One peer address may cause so many fetches in a minute; what is known costs nothing (8.5)."""
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

    def test_limit_of_fetches_under_way(self) -> None:
        """No more than 64 fetches at a time, whoever asks."""
        first, *_ = [self.resolver.resolve(f"{WEB}:{n}") for n in range(64)]
        self.assertNoResult(first)
        self.failureResultOf(self.resolver.resolve(f"{WEB}:64"), RateLimitExceeded)
        self.web.answer(OutboundRequestError())
        self.failureResultOf(first, UnresolvableDID)
        self.assertNoResult(self.resolver.resolve(f"{WEB}:64"))

    def test_malformed(self) -> None:
        """A DID without a place costs no lookup."""
        for n in range(9):
            did = f"did:web:example.com%3A0:{n}"
            self.failureResultOf(self.resolver.resolve(did, "192.0.2.1"), UnresolvableDID)
        self.assertEqual(self.web.requests, [])

    def test_addresses_instead_of_names(self) -> None:
        """An address is no host for a did:web, unless it is in an allowed network (8.5)."""
        hosts = ("127.0.0.1", "127.1", "2130706433", "0x7f.1", "0x7f000001", "1.1.1.1", "127.0.0.1%3A8443")
        for host in hosts:
            self.failureResultOf(self.resolver.resolve(f"did:web:{host}"), UnresolvableDID)
        self.resolver = self.a_resolver(allow_private=[ip_network("127.0.0.0/8")])
        for host in hosts[1:-1]:
            self.failureResultOf(self.resolver.resolve(f"did:web:{host}"), UnresolvableDID)
        self.assertEqual(self.web.requests, [])
        self.found("did:web:127.0.0.1%3A8443")
        self.assertEqual(self.web.requests[0][0], "https://127.0.0.1:8443/.well-known/did.json")

    def test_fault(self) -> None:
        """A fault of ours is logged, those who wait are answered, and the next one gets a new try."""
        resolving = self.resolver.resolve(WEB)
        self.web.answer(ZeroDivisionError())
        self.failureResultOf(resolving, UnresolvableDID)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.clock.advance(30)
        self.found()


class RecentTests(SynchronousTestCase):
    """:class:`LRUCache`."""

    def test_replacing_a_value(self) -> None:
        """A value that replaces another takes its room."""
        recent: LRUCache[int] = LRUCache(10, 100)
        for n in range(5):
            recent.put("a", n, 60)
        self.assertEqual(recent.get("a"), 4)
        recent.put("b", 5, 40)
        self.assertEqual((recent.get("a"), recent.get("b")), (4, 5))

    def test_value_that_does_not_fit(self) -> None:
        """A value over the limit by itself is not kept, and does no harm."""
        recent: LRUCache[int] = LRUCache(10, 100)
        recent.put("a", 1, 101)
        self.assertIsNone(recent.get("a"))
        recent.put("b", 2, 100)
        self.assertEqual(recent.get("b"), 2)
