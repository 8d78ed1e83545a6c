"""Nobody can have the mediator connect to its own host or network (reference 8.5): each place of the corpus."""

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


def web_did(host: str, port: int | None = None) -> str:
    """The did:web of a host, which makes of it whatever a DID can hold."""
    return "did:web:" + quote(host if port is None else f"{host}:{port}", safe="")


class CorpusTestCase(OutboundTestCase):
    """The real ways out, on names that are scripted and a reactor that notes where connections would go."""

    def setUp(self) -> None:
        super().setUp()
        self.go_by(ScriptedResolver())

    def go_by(self, names: ScriptedResolver, *allowed: Any) -> None:
        """Begin anew, with these names and networks."""
        self.names = self.reactor.nameResolver = names
        self.outbound = OutboundHTTPClient(self.reactor, allow_private=allowed)
        web = DIDWebResolver(self.reactor, self.outbound.get, _free, allow_private=allowed)
        self.resolver = DIDResolver(web, lambda short, long: succeed(None), lambda short: succeed(None))

    def resolve(self, did: str) -> Deferred[Any]:
        """Resolve a DID, on behalf of somebody."""
        return self.resolver.resolve(did, "198.51.100.7")


class CorpusTests(CorpusTestCase):
    def test_endpoints(self) -> None:
        """A POST to any place is refused, over http and https, with a port and without; nothing is connected to."""
        for place in PLACES:
            for url in (f"http://{place.host}/inbox", f"https://{place.host}:8443/inbox", f"HTTP://{place.host}"):
                self.failureResultOf(self.post(url), OutboundAddressError)
                self.assertEqual(self.attempts(), [], url)

    def test_documents(self) -> None:
        """No did:web of any place resolves; nothing is connected to."""
        for place in PLACES:
            for did in (web_did(place.host), web_did(place.host, 8443), f"did:web:{place.host}"):
                self.failureResultOf(self.resolve(did), MediatorError)
            self.failureResultOf(self.get(f"https://{place.host}/.well-known/did.json"), OutboundAddressError)
            self.assertEqual(self.attempts(), [], place.host)

    def test_redirects(self) -> None:
        """A redirect to any place, by its whole URL or by host alone, is refused."""
        for place in PLACES:
            for location in (f"{start}{place.host}/x" for start in ("http://", "https://", "//") if place.host):
                posted = self.redirected(location)
                self.failureResultOf(posted, OutboundError)
                self.assertEqual(self.attempts(), [(PUBLIC, 80)], location)

    def test_redirects_that_look_like_hosts(self) -> None:
        """A redirect is read by the rules of URLs: what is a path by these stays with the host that has sent it."""
        for location in (*URLS, "/\\127.0.0.1/", "\\\\127.0.0.1\\", "127.0.0.1", "http:///x", "//"):
            self.redirected(location).addErrback(lambda failure: failure.trap(OutboundError))
            self.assertEqual(set(self.attempts()), {(PUBLIC, 80)}, location)

    def redirected(self, location: str) -> Deferred[Any]:
        """A POST to a public address, which sends it elsewhere."""
        self.reactor.tcpClients.clear()
        posted = self.post(f"http://{PUBLIC}/inbox")
        self.answer(redirect(307, location.encode()))
        return posted

    def test_urls(self) -> None:
        """Other schemes, ports that are none, and what two readers read in two ways: refused, and nobody is asked."""
        for url in URLS:
            for way in (self.post, self.get):
                self.failureResultOf(way(url), OutboundAddressError)
                self.assertEqual((self.attempts(), self.names.asked), ([], []), url)

    def test_nobody(self) -> None:
        """What is neither address nor name leads nowhere."""
        for host in NOBODY:
            self.failureResultOf(self.post(f"http://{host}/"), OutboundError)
            self.failureResultOf(self.resolve(web_did(host)), UnresolvableDID)
            self.assertEqual(self.attempts(), [], host)

    def test_each_place_means_what_it_says(self) -> None:
        """
        Without the guard, each place is connected to as the corpus says: so it is the guard that stops them. What
        means nothing is refused even then, by how it is written, and nobody is asked.
        """
        for place in PLACES:
            self.go_by(ScriptedResolver(), *ANYWHERE)
            self.reactor.tcpClients.clear()
            posted = self.post(f"http://{place.host}:8080/")
            if place.means is None:
                self.failureResultOf(posted, OutboundAddressError)
                self.assertEqual((self.attempts(), self.names.asked), ([], []), place.host)
            else:
                self.assertEqual(self.attempts(), [(place.means, 8080)], place.host)


class RebindingTests(CorpusTestCase):
    """A name that resolves to one address when it is judged, and to another when it is asked again."""

    def test_judged_and_connected_to_are_one(self) -> None:
        """The name is asked for once, and the connection goes to what was judged; asked anew, it is refused."""
        for way in ("post", "resolve"):
            self.go_by(ScriptedResolver({"rebinding.example": [[PUBLIC], ["127.0.0.1"]]}))
            self.reactor.tcpClients.clear()
            post = lambda: self.post("https://rebinding.example/")  # noqa: E731  one of two ways
            begin = post if way == "post" else lambda: self.resolve("did:web:rebinding.example")
            first = begin()
            self.assertEqual((self.attempts(), self.names.asked), ([(PUBLIC, 443)], ["rebinding.example"]))
            self.refuse()
            self.failureResultOf(first, OutboundRequestError, UnresolvableDID)
            self.reactor.advance(31)  # as long as a failure of did:web is remembered
            self.failureResultOf(begin(), OutboundAddressError, UnresolvableDID)
            self.assertEqual(self.attempts(), [(PUBLIC, 443)])
            self.assertEqual(len(self.names.asked), 2)

    def test_at_the_next_address(self) -> None:
        """Where the first address does not answer, the next of the same answer is tried; no name is asked anew."""
        self.go_by(ScriptedResolver({"rebinding.example": [[PUBLIC, OTHER_PUBLIC], ["127.0.0.1"]]}))
        posted = self.post("http://rebinding.example/")
        self.refuse()
        self.assertEqual(self.attempts(), [(PUBLIC, 80), (OTHER_PUBLIC, 80)])
        self.refuse()
        self.failureResultOf(posted, OutboundRequestError)
        self.assertEqual(self.names.asked, ["rebinding.example"])

    def test_by_a_redirect_to_itself(self) -> None:
        """A redirect to the same name asks for it anew, and judges anew."""
        self.go_by(ScriptedResolver({"rebinding.example": [[PUBLIC], ["127.0.0.1"]]}))
        posted = self.post("http://rebinding.example/")
        self.answer(redirect(307, b"/inside"))
        self.failureResultOf(posted, OutboundAddressError)
        self.assertEqual(self.attempts(), [(PUBLIC, 80)])


class AllowedTests(CorpusTestCase):
    def test_others_stay_refused(self) -> None:
        """An operator who allows one network has opened no other one."""
        self.go_by(ScriptedResolver(), ip_network("10.9.0.0/16"))
        for host in RESOLVING:
            self.failureResultOf(self.post(f"http://{host}/"), OutboundAddressError)
            self.assertEqual(self.attempts(), [], host)
