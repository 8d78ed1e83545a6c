"""
Who is on the other side, behind the proxies that are trusted to say so (contract section 3).

Which pages may open WebSockets, by the origin that their browser names.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

from twisted.web.http_headers import Headers

from mediatord.protocol.probe_requests import PROBE_CLIENT

Network = IPv4Network | IPv6Network

# Addresses of which it is remembered whether they are in a community.
_MAX_CACHED_ADDRESSES = 4096


class ClientAddressResolver:
    """
    Finds the address of a client.

    :param trusted: networks of proxies whose `X-Forwarded-For` counts.
    :param token: what the daemon's own requests have in their heads; empty if it makes none.
    :param communities: networks of which each pays as one, as other mediators do.
    """

    def __init__(self, trusted: Sequence[Network], token: bytes = b"", peer_networks: Sequence[Network] = ()) -> None:
        self._trusted = tuple(trusted)
        self._token = token
        self._peer_networks: dict[Network, str] = {}
        self._members: dict[str, str | None] = {}
        self.set_peer_networks(peer_networks)

    def set_peer_networks(self, peer_networks: Sequence[Network]) -> None:
        """Go by other communities from now on."""
        # The smallest one that an address is in counts.
        ordered = sorted(peer_networks, key=lambda network: -network.prefixlen)
        self._peer_networks = {network: name_peer_network(network) for network in ordered}
        self._members.clear()

    def client(self, connected: str, forwarded_for: str | None) -> str:
        """
        The address a request came from.

        :param connected: address of the TCP peer; empty for a UNIX socket, which only a local proxy can be behind.
        :param forwarded_for: the header as received; read from the right, past every trusted proxy, so that what a
            client writes into it itself is never believed.
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
        Who is charged for a request: the address of the client, of an IPv6 one its /64, which is what one host has;
        a community that it is in; for the daemon's own nobody.

        :param token: as in the head; None without one.
        """
        if token and self._token and hmac.compare_digest(token, self._token):
            return PROBE_CLIENT
        client = self.client(connected, forwarded_for)
        return self.find_peer_network(client) or _get_host_key(client)

    def host(self, connected: str) -> str:
        """What one host is called, by the address of the TCP peer; whatever it is trusted with."""
        return _get_host_key(self.client(connected, None))

    def find_peer_network(self, address: str) -> str | None:
        """What the community is called that an address is in, if it is."""
        if not self._peer_networks:
            return None
        if address not in self._members:
            if len(self._members) >= _MAX_CACHED_ADDRESSES:
                self._members.clear()
            found = (name for network, name in self._peer_networks.items() if is_in_networks(address, (network,)))
            self._members[address] = next(found, None)
        return self._members[address]

    def trusts(self, address: str) -> bool:
        """Whether this address is a trusted proxy."""
        return is_in_networks(address, self._trusted)


def name_peer_network(network: Network) -> str:
    """What a network is called that pays as one: a single address is itself."""
    return str(network.network_address if network.num_addresses == 1 else network)


def is_in_networks(address: str, networks: Sequence[Network]) -> bool:
    """Whether an address lies in one of the networks; an IPv4 address mapped into IPv6 counts as itself."""
    plain = _normalize_address(address)
    if plain is None:
        return False
    parsed = ip_address(plain)
    return any(parsed.version == network.version and parsed in network for network in networks)


@lru_cache(4096)
def _get_host_key(address: str) -> str:
    if ":" not in address:
        return address
    return str(ip_network((address, 64), strict=False).network_address)


@lru_cache(4096)
def _normalize_address(address: str) -> str | None:
    """The address in its usual spelling, or None if it is none; a port or brackets are taken off."""
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


# The second is what the first was called in drafts of the protocol, which clients may still speak.
_ORIGIN_HEADERS = (b"Origin", b"Sec-WebSocket-Origin")


class AllowedOrigins:
    """
    The origins that are allowed. What names none is no page, and may open a WebSocket as well.

    :param patterns: as `https://app.example`, with `*` for any part of the host or for any port; `*` alone is every
        origin, also `null`, which browsers send for a page that has none.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self.allow(patterns)

    def allow(self, patterns: Iterable[str]) -> None:
        """Allow these from now on, and no others; WebSockets that are open stay open."""
        patterns = tuple(patterns)
        self._pattern = (
            None if "*" in patterns else re.compile("|".join(map(_build_origin_expression, patterns)), re.IGNORECASE)
        )

    def check_and_remove(self, headers: Headers) -> bool:
        """
        Whether the origins in the headers of a handshake are allowed; they are removed.

        Autobahn would refuse some that it cannot take apart, and every `null`.
        """
        named = [value for name in _ORIGIN_HEADERS for value in headers.getRawHeaders(name, ())]
        for name in _ORIGIN_HEADERS:
            headers.removeHeader(name)
        return self._pattern is None or all(self._pattern.fullmatch(one.decode("latin-1").strip()) for one in named)


def _build_origin_expression(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", r"[^/:]*")
