"""
SSRF guard: which addresses mediatord may connect to on behalf of others (reference 8.5).

Only public unicast addresses are permitted, without those reserved for guests of a cloud, plus networks that the
operator allows.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

IPAddress = IPv4Address | IPv6Address
IPNetwork = IPv4Network | IPv6Network

# Explicit list, because `ipaddress.is_global` differs between Python releases.
_BLOCKED_IPV4 = tuple(
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this host
        "10.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT
        "127.0.0.0/8",
        "168.63.129.16/32",  # a cloud's metadata service, at a public address
        "169.254.0.0/16",  # link-local, with the other metadata services
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
    )
)
_GLOBAL_UNICAST_IPV6 = IPv6Network("2000::/3")
_BLOCKED_IPV6 = tuple(
    IPv6Network(network)
    for network in (
        "2001::/23",  # Teredo, ORCHID and other protocol assignments
        "2001:db8::/32",
        "2620:4f:8000::/48",
        "3fff::/20",
    )
)
_SIX_TO_FOUR_PREFIX = IPv6Network("2002::/16")
_NAT64_PREFIX = IPv6Network("64:ff9b::/96")
# Interface identifiers of ISATAP (RFC 5214 6.1), which embed an IPv4 address under any prefix.
_ISATAP_IDENTIFIERS = frozenset((0x0000_5EFE, 0x0200_5EFE))
_32_BITS = 0xFFFF_FFFF


class AddressGuard:
    """Checks resolved addresses; names are never checked."""

    def __init__(self, allowed: Iterable[IPNetwork] = ()) -> None:
        """:param allowed: non-public networks that are permitted."""
        self._allowed = tuple(allowed)

    def permits(self, text: str) -> bool:
        """
        Whether a connection to an address is permitted. An embedded IPv4 address (mapped, 6to4, NAT64) is checked in
        place of the IPv6 address; of ISATAP addresses both.

        :param text: as returned by a resolver; text that is not an address is refused.
        """
        try:
            address = ip_address(text)
        except ValueError:
            return False
        inner = _extract_ipv4(address) if isinstance(address, IPv6Address) else None
        return self._allows(address) or (inner is not None and self._allows(inner)) or _is_public(inner or address)

    def _allows(self, address: IPAddress) -> bool:
        return any(address in network for network in self._allowed)


def _extract_ipv4(address: IPv6Address) -> IPv4Address | None:
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address in _NAT64_PREFIX:
        return IPv4Address(int(address) & _32_BITS)
    if address in _SIX_TO_FOUR_PREFIX:
        return address.sixtofour
    return None


def _is_public(address: IPAddress) -> bool:
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _BLOCKED_IPV4)
    if int(address) >> 32 & _32_BITS in _ISATAP_IDENTIFIERS and not _is_public(IPv4Address(int(address) & _32_BITS)):
        return False
    return address in _GLOBAL_UNICAST_IPV6 and not any(address in network for network in _BLOCKED_IPV6)
