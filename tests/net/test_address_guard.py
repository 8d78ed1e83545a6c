"""Addresses to which mediatord may connect on behalf of strangers (reference 8.5)."""

from __future__ import annotations

from ipaddress import ip_network

import pytest

from mediatord.net.outbound_http import AddressGuard


@pytest.mark.parametrize(
    "address",
    [
        "1.1.1.1",
        "93.184.216.34",
        "100.63.255.255",
        "100.128.0.0",
        "172.15.255.255",
        "172.32.0.0",
        "223.255.255.255",
        "2606:4700:4700::1111",
        "2001:4860:4860::8888",
        "::ffff:1.1.1.1",
        "64:ff9b::101:101",
        "2002:101:101::1",
        "2606:4700::5efe:101:101",
    ],
)
def test_allows_public_addresses(address: str) -> None:
    """Public unicast addresses are allowed, also as IPv4-mapped IPv6."""
    assert AddressGuard().permits(address)


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "0.1.2.3",
        "10.0.0.1",
        "100.64.0.1",
        "100.100.100.200",
        "127.0.0.1",
        "127.255.255.254",
        "168.63.129.16",
        "169.254.169.254",
        "172.16.0.1",
        "172.31.255.255",
        "192.0.0.192",
        "192.0.2.1",
        "192.88.99.1",
        "192.168.1.1",
        "198.18.0.1",
        "198.51.100.1",
        "203.0.113.1",
        "224.0.0.1",
        "239.255.255.255",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::127.0.0.1",
        "::ffff:127.0.0.1",
        "::ffff:7f00:1",
        "::ffff:169.254.169.254",
        "::ffff:0:127.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::a00:1",
        "100::1",
        "2001::1",
        "2001:0:7f00:1::",
        "2001:db8::1",
        "2002:7f00:1::",
        "2002:a00:1::1",
        "2606:4700::5efe:7f00:1",
        "2606:4700::200:5efe:a00:1",
        "3fff::1",
        "5f00::1",
        "fc00::1",
        "fd00:ec2::254",
        "fe80::1",
        "fe80::5efe:101:101",
        "fe80::1%eth0",
        "fec0::1",
        "ff02::1",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "127.1",
        "localhost",
        "",
    ],
)
def test_refuses_other_addresses(address: str) -> None:
    """Loopback, private, link-local, multicast, reserved and metadata addresses, and embedded forms."""
    assert not AddressGuard().permits(address)


def test_allowed_networks() -> None:
    """A configured network is allowed, also as IPv4-mapped IPv6; its neighbours are not."""
    guard = AddressGuard([ip_network("10.1.0.0/16"), ip_network("fd00::/64")])
    assert guard.permits("10.1.2.3")
    assert guard.permits("::ffff:10.1.2.3")
    assert guard.permits("fd00::1")
    assert not guard.permits("10.2.0.1")
    assert not guard.permits("127.0.0.1")
    assert not guard.permits("fd00:0:0:1::1")
    assert guard.permits("1.1.1.1")
