"""No location of the corpus makes the mediator connect to its own host or network (reference 8.5)."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Any
from urllib.parse import quote

from twisted.internet.defer import Deferred, succeed

from mediatord.errors import MediatorError, UnresolvableDID
from mediatord.net.did_resolver import DIDResolver, DIDWebResolver
from mediatord.net.outbound_http import OutboundAddressError, OutboundError, OutboundHTTPClient, OutboundRequestError
from tests.net.outbound_test_case import OTHER_PUBLIC, PUBLIC, OutboundTestCase, redirect
from tests.net.ssrf_corpus import NOBODY, PLACES, RESOLVING, URLS, ScriptedResolver

ANYWHERE = (ip_network("0.0.0.0/0"), ip_network("::/0"))


async def _free(peer: str) -> int:
    return 0


def did_web_of(host: str, port: int | None = None) -> str:
    """The did:web of a host, as far as a DID can express it."""
    return "did:web:" + quote(host if port is None else f"{host}:{port}", safe="")


class CorpusTestCase(OutboundTestCase):
    """The real outbound client, with scripted names and a reactor that records connections."""

    def setUp(self) -> None:
        super().setUp()
        self.restart_with(ScriptedResolver())

    def restart_with(self, names: ScriptedResolver, *allowed: Any) -> None:
        """Start again, with these names and networks."""
        self.names = self.reactor.nameResolver = names
        self.outbound = OutboundHTTPClient(self.reactor, allow_private=allowed)
        web = DIDWebResolver(self.reactor, self.outbound.get, _free, allow_private=allowed)
        self.resolver = DIDResolver(web, lambda short, long: succeed(None), lambda short: succeed(None))

    def resolve(self, did: str) -> Deferred[Any]:
        """Resolve a DID on behalf of a peer."""
        return self.resolver.resolve(did, "198.51.100.7")


class CorpusTests(CorpusTestCase):
    def test_endpoints(self) -> None:
        """
        A POST to any location is refused, over http and https, with and without a port; nothing is connected to.
        """
        for place in PLACES:
            for url in (f"http://{place.host}/inbox", f"https://{place.host}:8443/inbox", f"HTTP://{place.host}"):
                self.failureResultOf(self.post(url), OutboundAddressError)
                self.assertEqual(self.attempts(), [], url)

    def test_documents(self) -> None:
        """No did:web of any location resolves; nothing is connected to."""
        for place in PLACES:
            for did in (did_web_of(place.host), did_web_of(place.host, 8443), f"did:web:{place.host}"):
                self.failureResultOf(self.resolve(did), MediatorError)
            self.failureResultOf(self.get(f"https://{place.host}/.well-known/did.json"), OutboundAddressError)
            self.assertEqual(self.attempts(), [], place.host)

    def test_redirects(self) -> None:
        """A redirect to any location, by URL or by host alone, is refused."""
        for place in PLACES:
            for location in (f"{start}{place.host}/x" for start in ("http://", "https://", "//") if place.host):
                posted = self.redirect_to(location)
                self.failureResultOf(posted, OutboundError)
                self.assertEqual(self.attempts(), [(PUBLIC, 80)], location)

    def test_redirects_that_look_like_hosts(self) -> None:
        """A redirect is parsed as a URL: a path stays on the host that sent it."""
        for location in (*URLS, "/\\127.0.0.1/", "\\\\127.0.0.1\\", "127.0.0.1", "http:///x", "//"):
            self.redirect_to(location).addErrback(lambda failure: failure.trap(OutboundError))
            self.assertEqual(set(self.attempts()), {(PUBLIC, 80)}, location)

    def redirect_to(self, location: str) -> Deferred[Any]:
        """Post to a public address, which redirects."""
        self.reactor.tcpClients.clear()
        posted = self.post(f"http://{PUBLIC}/inbox")
        self.respond(redirect(307, location.encode()))
        return posted

    def test_urls(self) -> None:
        """Other schemes, invalid ports and ambiguous URLs are refused without a lookup."""
        for url in URLS:
            for way in (self.post, self.get):
                self.failureResultOf(way(url), OutboundAddressError)
                self.assertEqual((self.attempts(), self.names.asked), ([], []), url)

    def test_neither_address_nor_name(self) -> None:
        """Hosts that are neither address nor name are refused."""
        for host in NOBODY:
            self.failureResultOf(self.post(f"http://{host}/"), OutboundError)
            self.failureResultOf(self.resolve(did_web_of(host)), UnresolvableDID)
            self.assertEqual(self.attempts(), [], host)

    def test_unguarded_connections_reach_targets(self) -> None:
        """
        Without the guard each location is connected to as the corpus says, so it is the guard that refuses. Invalid
        ones are refused even then, by syntax, without a lookup.
        """
        for place in PLACES:
            self.restart_with(ScriptedResolver(), *ANYWHERE)
            self.reactor.tcpClients.clear()
            posted = self.post(f"http://{place.host}:8080/")
            if place.means is None:
                self.failureResultOf(posted, OutboundAddressError)
                self.assertEqual((self.attempts(), self.names.asked), ([], []), place.host)
            else:
                self.assertEqual(self.attempts(), [(place.means, 8080)], place.host)


class RebindingTests(CorpusTestCase):
    """A name that resolves to different addresses in successive lookups."""

    def test_connects_to_checked_address(self) -> None:
        """The name is looked up once, and the connection goes to the checked address; a new lookup is refused."""
        for way in ("post", "resolve"):
            self.restart_with(ScriptedResolver({"rebinding.example": [[PUBLIC], ["127.0.0.1"]]}))
            self.reactor.tcpClients.clear()
            post = lambda: self.post("https://rebinding.example/")  # noqa: E731  one of two ways
            begin = post if way == "post" else lambda: self.resolve("did:web:rebinding.example")
            first = begin()
            self.assertEqual((self.attempts(), self.names.asked), ([(PUBLIC, 443)], ["rebinding.example"]))
            self.refuse()
            self.failureResultOf(first, OutboundRequestError, UnresolvableDID)
            self.reactor.advance(31)  # as long as a failure of did:web is cached
            self.failureResultOf(begin(), OutboundAddressError, UnresolvableDID)
            self.assertEqual(self.attempts(), [(PUBLIC, 443)])
            self.assertEqual(len(self.names.asked), 2)

    def test_next_address_of_same_lookup(self) -> None:
        """If the first address does not answer, the next of the same lookup is tried."""
        self.restart_with(ScriptedResolver({"rebinding.example": [[PUBLIC, OTHER_PUBLIC], ["127.0.0.1"]]}))
        posted = self.post("http://rebinding.example/")
        self.refuse()
        self.assertEqual(self.attempts(), [(PUBLIC, 80), (OTHER_PUBLIC, 80)])
        self.refuse()
        self.failureResultOf(posted, OutboundRequestError)
        self.assertEqual(self.names.asked, ["rebinding.example"])

    def test_redirect_to_same_name(self) -> None:
        """A redirect to the same name looks it up and checks it again."""
        self.restart_with(ScriptedResolver({"rebinding.example": [[PUBLIC], ["127.0.0.1"]]}))
        posted = self.post("http://rebinding.example/")
        self.respond(redirect(307, b"/inside"))
        self.failureResultOf(posted, OutboundAddressError)
        self.assertEqual(self.attempts(), [(PUBLIC, 80)])


class AllowedTests(CorpusTestCase):
    def test_other_networks_stay_refused(self) -> None:
        """Allowing one network allows no other."""
        self.restart_with(ScriptedResolver(), ip_network("10.9.0.0/16"))
        for host in RESOLVING:
            self.failureResultOf(self.post(f"http://{host}/"), OutboundAddressError)
            self.assertEqual(self.attempts(), [], host)
