"""Who is on the other side, behind the proxies that are trusted to say so (contract section 3)."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

from mediatord.synthetic import ITSELF

Network = IPv4Network | IPv6Network

# Addresses of which it is remembered whether they are in a community.
_MEMBERS = 4096


class Peers:
    """
    Finds the address of a client.

    :param trusted: networks of proxies whose `X-Forwarded-For` counts.
    :param token: what the daemon's own requests have in their heads; empty if it makes none.
    :param communities: networks of which each pays as one, as other mediators do.
    """

    def __init__(self, trusted: Sequence[Network], token: bytes = b"", communities: Sequence[Network] = ()) -> None:
        self._trusted = tuple(trusted)
        self._token = token
        self._communities: dict[Network, str] = {}
        self._members: dict[str, str | None] = {}
        self.recognise(communities)

    def recognise(self, communities: Sequence[Network]) -> None:
        """Go by other communities from now on."""
        # The smallest one that an address is in counts.
        ordered = sorted(communities, key=lambda network: -network.prefixlen)
        self._communities = {network: community(network) for network in ordered}
        self._members.clear()

    def client(self, connected: str, forwarded_for: str | None) -> str:
        """
        The address a request came from.

        :param connected: address of the TCP peer; empty for a UNIX socket, which only a local proxy can be behind.
        :param forwarded_for: the header as received; read from the right, past every trusted proxy, so that what a
            client writes into it itself is never believed.
        """
        if forwarded_for is None or not (connected == "" or self.trusts(connected)):
            return _plain(connected) or connected
        for hop in reversed(forwarded_for[-2048:].split(",")):
            address = _plain(hop.strip())
            if address is None:
                break
            connected = address
            if not self.trusts(address):
                break
        return connected

    def payer(self, connected: str, forwarded_for: str | None, token: bytes | None = None) -> str:
        """
        Who is charged for a request: the address of the client, of an IPv6 one its /64, which is what one host has;
        a community that it is in; for the daemon's own nobody.

        :param token: as in the head; None without one.
        """
        if token and self._token and hmac.compare_digest(token, self._token):
            return ITSELF
        client = self.client(connected, forwarded_for)
        return self.community_of(client) or _payer(client)

    def host(self, connected: str) -> str:
        """What one host is called, by the address of the TCP peer; whatever it is trusted with."""
        return _payer(self.client(connected, None))

    def community_of(self, address: str) -> str | None:
        """What the community is called that an address is in, if it is."""
        if not self._communities:
            return None
        if address not in self._members:
            if len(self._members) >= _MEMBERS:
                self._members.clear()
            found = (name for network, name in self._communities.items() if is_within(address, (network,)))
            self._members[address] = next(found, None)
        return self._members[address]

    def trusts(self, address: str) -> bool:
        """Whether this address is a trusted proxy."""
        return is_within(address, self._trusted)


def community(network: Network) -> str:
    """What a network is called that pays as one: a single address is itself."""
    return str(network.network_address if network.num_addresses == 1 else network)


def is_within(address: str, networks: Sequence[Network]) -> bool:
    """Whether an address lies in one of the networks; an IPv4 address mapped into IPv6 counts as itself."""
    plain = _plain(address)
    if plain is None:
        return False
    parsed = ip_address(plain)
    return any(parsed.version == network.version and parsed in network for network in networks)


@lru_cache(4096)
def _payer(address: str) -> str:
    if ":" not in address:
        return address
    return str(ip_network((address, 64), strict=False).network_address)


@lru_cache(4096)
def _plain(address: str) -> str | None:
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
