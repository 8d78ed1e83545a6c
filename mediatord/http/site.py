"""The HTTP site: limits on connections, and no access log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from autobahn.twisted.resource import WebSocketResource
from twisted.web.server import Site

from mediatord.http.channel import MediatorHTTPChannel, MediatorRequest
from mediatord.http.client_address import get_host
from mediatord.http.flow_control import MAX_UNREAD_TOTAL, ResponseBudget
from mediatord.http.resources import HTTPContext, RootResource
from mediatord.http.websocket import MediatorSocketFactory


@dataclass(frozen=True, slots=True)
class SiteLimits:
    """
    Limits of the site.

    :param max_body: bytes of a body, and of a message of a socket.
    :param max_per_host: connections of one address, without WebSockets, which have their own limit.
    :param max_per_trusted_network: the same for an address in a peer network.
    :param max_send_queue: bytes of pushes queued for one socket.
    :param max_unread: bytes of responses that clients have not read.
    """

    max_body: int
    max_per_host: int
    max_per_trusted_network: int = 0
    max_send_queue: int = 1_048_576
    max_unread: int = MAX_UNREAD_TOTAL


class MediatorSite(Site):
    """
    A site without forms and access log, which cost more than the rest of a request.

    :ivar socket_factory: makes WebSockets.
    """

    protocol = MediatorHTTPChannel  # type: ignore[assignment]  # instead of a proxy that could speak HTTP/2
    requestFactory = MediatorRequest
    noisy = False

    def __init__(self, context: HTTPContext, limits: SiteLimits) -> None:
        super().__init__(RootResource(context), reactor=context.clock, parsePOSTFormSubmission=False)
        self.socket_factory = MediatorSocketFactory(context)
        self.sockets = WebSocketResource(self.socket_factory)
        self._per_host: dict[str, int] = {}
        self.context = context
        self.clock = context.clock
        self.scheduler = context.scheduler
        self.reading: set[MediatorHTTPChannel] = set()
        self.memory = context.memory
        self.unread = ResponseBudget(released=self.memory.released)
        self.limit(limits)

    def limit(self, limits: SiteLimits) -> None:
        """Change the limits. Open connections are not affected by those of their number."""
        self.max_body = limits.max_body
        self._max_per_host = limits.max_per_host
        self._max_per_trusted_network = max(limits.max_per_host, limits.max_per_trusted_network)
        self.socket_factory.limit(limits.max_body, limits.max_send_queue)
        self.unread.limit(limits.max_unread)

    def read_ahead(self) -> tuple[int, int]:
        """Number of connections with incomplete or pending requests, and the bytes of those."""
        self.reading = {channel for channel in self.reading if channel.held}
        return len(self.reading), sum(channel.held for channel in self.reading)

    def buildProtocol(self, addr: object) -> Any:
        """Build a channel, if the address may have another connection."""
        addresses, host = self.context.client_addresses, self._find_limited_host(addr)
        open_ones = self._per_host.get(host, 0)
        if host and open_ones >= self._max_per_host:
            is_trusted = addresses.find_peer_network(addresses.client(get_host(addr), None))
            if not is_trusted or open_ones >= self._max_per_trusted_network:
                return None
        self._per_host[host] = open_ones + 1
        channel: Any = super().buildProtocol(cast(Any, addr))
        channel.address = addr
        return channel

    def closed(self, channel: MediatorHTTPChannel) -> None:
        """Count out a connection that was closed, or became a WebSocket."""
        self.reading.discard(channel)
        host = self._find_limited_host(channel.address)
        self._per_host[host] -= 1
        if not self._per_host[host]:
            del self._per_host[host]

    def _find_limited_host(self, address: object) -> str:
        """The key of a connection; empty for trusted proxies and UNIX sockets, which have no limit."""
        host, addresses = get_host(address), self.context.client_addresses
        return "" if addresses.trusts(host) else addresses.host(host)

    def log(self, request: object) -> None:
        """Log nothing: requests are in the event log."""
