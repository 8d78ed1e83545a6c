"""Client addresses behind trusted proxies, rate limit keys, allowed origins of WebSockets (contract section 3)."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

from twisted.web.http_headers import Headers
from twisted.web.server import Request

from mediatord.protocol.probe_markers import PROBE_CLIENT

Network = IPv4Network | IPv6Network

# Addresses of which something is cached.
_MAX_CACHED_ADDRESSES = 4096


class ClientAddressResolver:
    """
    Finds the address of a client.

    :param trusted: networks of proxies whose `X-Forwarded-For` counts.
    :param token: header value of the daemon's own requests; empty if it makes none.
    :param peer_networks: networks with a common rate limit each, such as those of other mediators.
    :ivar find_peer_network: the name of the peer network of an address; None if there is none.
    """

    def __init__(self, trusted: Sequence[Network], token: bytes = b"", peer_networks: Sequence[Network] = ()) -> None:
        self._trusted = tuple(trusted)
        self._token = token
        self.set_peer_networks(peer_networks)

    def set_peer_networks(self, peer_networks: Sequence[Network]) -> None:
        """Replace the peer networks."""
        # The smallest network of an address counts.
        ordered = sorted(peer_networks, key=lambda network: -network.prefixlen)
        self._peer_networks = {network: name_peer_network(network) for network in ordered}
        self.find_peer_network = lru_cache(_MAX_CACHED_ADDRESSES)(self._find_peer_network)

    def client(self, connected: str, forwarded_for: str | None) -> str:
        """
        The address of the client.

        :param connected: address of the TCP peer; empty for a UNIX socket, which only a local proxy can use.
        :param forwarded_for: header as received. It is read from the right, past every trusted proxy, so that
            entries written by the client itself do not count.
        """
        if forwarded_for is None or not (connected == "" or self.trusts(connected)):
            return _normalize_address(connected) or connected
        for hop in reversed(forwarded_for[-2048:].split(",")):
            address = _normalize_address(hop.strip())
            if address is None:
                break
            connected = address
            if not self.trusts(address):
                break
        return connected

    def rate_limit_key(self, connected: str, forwarded_for: str | None, token: bytes | None = None) -> str:
        """
        The rate limit key of a request: the peer network of the client, else its address, for IPv6 its /64; another
        key for the daemon's own requests.

        :param token: header value; None without one.
        """
        if token and self._token and hmac.compare_digest(token, self._token):
            return PROBE_CLIENT
        client = self.client(connected, forwarded_for)
        return self.find_peer_network(client) or _get_host_key(client)

    def host(self, connected: str) -> str:
        """The key of a TCP peer, trusted or not."""
        return _get_host_key(self.client(connected, None))

    def _find_peer_network(self, address: str) -> str | None:
        found = (name for network, name in self._peer_networks.items() if is_in_networks(address, (network,)))
        return next(found, None)

    def trusts(self, address: str) -> bool:
        """Whether this address is a trusted proxy."""
        return is_in_networks(address, self._trusted)


def name_peer_network(network: Network) -> str:
    """The name of a peer network: the address itself if it has only one."""
    return str(network.network_address if network.num_addresses == 1 else network)


def is_in_networks(address: str, networks: Sequence[Network]) -> bool:
    """Whether an address lies in one of the networks; an IPv4 address mapped into IPv6 counts as itself."""
    plain = _normalize_address(address)
    if plain is None:
        return False
    parsed = ip_address(plain)
    return any(parsed.version == network.version and parsed in network for network in networks)


@lru_cache(_MAX_CACHED_ADDRESSES)
def _get_host_key(address: str) -> str:
    if ":" not in address:
        return address
    return str(ip_network((address, 64), strict=False).network_address)


@lru_cache(_MAX_CACHED_ADDRESSES)
def _normalize_address(address: str) -> str | None:
    """The canonical form of an address without port and brackets; None if it is invalid."""
    if address.startswith("["):
        address = address[1:].partition("]")[0]
    elif address.count(":") == 1:
        address = address.partition(":")[0]
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return None
    mapped = getattr(parsed, "ipv4_mapped", None)
    return str(mapped or parsed)


def get_addresses(request: Request) -> tuple[str, str | None]:
    """Address of the TCP peer of a request, and the value of `X-Forwarded-For`."""
    # As bytes: invalid UTF-8 must not raise.
    forwarded = request.requestHeaders.getRawHeaders(b"x-forwarded-for")
    return get_host(request.getClientAddress()), b",".join(forwarded).decode("latin-1") if forwarded else None


def get_host(address: object) -> str:
    """The IP address of a TCP peer; empty for a UNIX socket."""
    return getattr(address, "host", "") or ""


# The second name is that of protocol drafts, which clients may still use.
_ORIGIN_HEADERS = (b"Origin", b"Sec-WebSocket-Origin")


class AllowedOrigins:
    """
    The origins whose pages may open WebSockets. A request without an origin is always allowed.

    :param patterns: such as `https://app.example`, with `*` for any part of the host or any port; `*` alone allows
        every origin, also `null`, which browsers send for pages without one.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self.allow(patterns)

    def allow(self, patterns: Iterable[str]) -> None:
        """Replace the patterns; open WebSockets are not affected."""
        patterns = tuple(patterns)
        self._pattern = (
            None if "*" in patterns else re.compile("|".join(map(_build_origin_expression, patterns)), re.IGNORECASE)
        )

    def check_and_remove(self, headers: Headers) -> bool:
        """
        Whether the origins in the headers of a handshake are allowed; the headers are removed.

        Autobahn would reject some that it cannot parse, and every `null`.
        """
        named = [value for name in _ORIGIN_HEADERS for value in headers.getRawHeaders(name, ())]
        for name in _ORIGIN_HEADERS:
            headers.removeHeader(name)
        return self._pattern is None or all(self._pattern.fullmatch(one.decode("latin-1").strip()) for one in named)


def _build_origin_expression(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", r"[^/:]*")
