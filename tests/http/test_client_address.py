"""Client addresses behind proxies."""

from ipaddress import ip_network

import pytest

from mediatord.http.client_address import ClientAddressResolver, is_in_networks

TRUSTED = ClientAddressResolver([ip_network("10.0.0.0/8"), ip_network("::1/128")])


@pytest.mark.parametrize(
    ("connected", "forwarded", "client"),
    [
        ("192.0.2.1", None, "192.0.2.1"),
        ("192.0.2.1", "203.0.113.9", "192.0.2.1"),
        ("10.0.0.1", "203.0.113.9", "203.0.113.9"),
        ("10.0.0.1", "1.1.1.1, 203.0.113.9", "203.0.113.9"),
        ("10.0.0.1", "203.0.113.9, 10.9.9.9", "203.0.113.9"),
        ("10.0.0.1", "nonsense", "10.0.0.1"),
        ("10.0.0.1", "203.0.113.9, nonsense, 10.9.9.9", "10.9.9.9"),
        ("10.0.0.1", "203.0.113.9:4711", "203.0.113.9"),
        ("10.0.0.1", "[2001:db8::1]:4711", "2001:db8::1"),
        ("::1", "::ffff:203.0.113.9", "203.0.113.9"),
        ("::ffff:10.0.0.1", "203.0.113.9", "203.0.113.9"),
        ("", "203.0.113.9", "203.0.113.9"),
        ("", None, ""),
        ("10.0.0.1", "", "10.0.0.1"),
    ],
)
def test_client_address(connected: str, forwarded: str | None, client: str) -> None:
    """Only trusted proxies are believed, and only the last untrusted address they report (contract section 3)."""
    assert TRUSTED.client(connected, forwarded) == client


@pytest.mark.parametrize(
    ("address", "rate_limit_key"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::"),
        ("2001:db8:1:3::1", "2001:db8:1:3::"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("", ""),
    ],
)
def test_ipv6_hosts_share_rate_limit_of_their_network(address: str, rate_limit_key: str) -> None:
    """The rate limit key of an IPv6 address is its /64."""
    assert TRUSTED.rate_limit_key(address, None) == rate_limit_key


def test_network_contains_mapped_ipv4_address() -> None:
    """A network contains IPv4-mapped IPv6 addresses, and no names."""
    assert is_in_networks("::ffff:127.0.0.1", [ip_network("127.0.0.0/8")])
    assert not is_in_networks("localhost", [ip_network("0.0.0.0/0")])
    assert not is_in_networks("::1", [ip_network("127.0.0.0/8")])
