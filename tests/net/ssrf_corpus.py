"""
Locations by which strangers may try to reach the mediator's own host or network (reference 8.5).

They are used for documents of did:web, and for endpoints and their redirects.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from twisted.internet.interfaces import IHostResolution, IResolutionReceiver

from tests.net.outbound_test_case import OTHER_PUBLIC, PUBLIC, FakeResolver


@dataclass(frozen=True, slots=True)
class SSRFTarget:
    """
    A host in a spelling.

    :param host: as in a URL.
    :param means: the address that it stands for; None if it must be refused without a lookup.
    """

    host: str
    means: str | None = None


# Names whose owners choose the addresses.
RESOLVING: dict[str, Sequence[str] | None] = {
    "loopback.example": ["127.0.0.1"],
    "loopback6.example": ["::1"],
    "mixed-a.example": [PUBLIC, "127.0.0.1"],
    "mixed-aaaa.example": [PUBLIC, "::1"],
    "mixed-6-then-4.example": [OTHER_PUBLIC, "10.0.0.1"],
    "mapped.example": ["::ffff:127.0.0.1"],
    "metadata.example": ["169.254.169.254"],
    "many.example": [PUBLIC] * 20 + ["127.0.0.1"],
    "127.0.0.1.nip.example": ["127.0.0.1"],
    "under_score.example": ["127.0.0.1"],
    "localhost": ["127.0.0.1", "::1"],
    "localhost.": ["127.0.0.1"],
    "LOCALHOST": ["127.0.0.1"],
    "a.localhost": ["127.0.0.1"],
    "localhost.localdomain": ["127.0.0.1"],
    "ip6-localhost": ["::1"],
    "ip6-loopback": ["::1"],
    "metadata.google.internal": ["169.254.169.254"],
    "instance-data": ["169.254.169.254"],
    "printer.local": ["192.168.1.9"],
    "xn--bcher-kva.example": ["127.0.0.1"],
}


def _first(host: str) -> str:
    """The address to which an unguarded connection goes."""
    return next(iter(RESOLVING[host] or ()))


_NAMES = [SSRFTarget(host, _first(host)) for host in RESOLVING if not host.startswith("xn--")]

_LOOPBACK = "127.0.0.1"
_METADATA = "169.254.169.254"

# Parsed like `inet_aton`: one to four parts, each decimal, octal or hexadecimal.
_NUMBERS = [
    *(
        SSRFTarget(host, _LOOPBACK)
        for host in (
            "127.0.0.1",
            "2130706433",
            "017700000001",
            "0x7f000001",
            "0X7F000001",
            "0x7f.0.0.1",
            "0177.0.0.1",
            "0177.0x0.0.01",
            "0000177.0.0.1",
            "0x7f.1",
            "127.1",
            "127.0.1",
            "127.0.0.01",
            "0x7f.0x0.0x0.0x1",
            "00000000177.00000000.00000000.00000001",
        )
    ),
    SSRFTarget("127.1.2.3", "127.1.2.3"),
    SSRFTarget("0", "0.0.0.0"),
    SSRFTarget("0.0.0.0", "0.0.0.0"),
    SSRFTarget("0x0", "0.0.0.0"),
    SSRFTarget("10.1", "10.0.0.1"),
    SSRFTarget("167772161", "10.0.0.1"),
    SSRFTarget("012.0.0.1", "10.0.0.1"),
    SSRFTarget("172.16.1", "172.16.0.1"),
    SSRFTarget("192.168.257", "192.168.1.1"),
    SSRFTarget("0300.0250.1", "192.168.0.1"),
    SSRFTarget("2852039166", _METADATA),
    SSRFTarget("0xa9fea9fe", _METADATA),
    SSRFTarget("0251.0376.0251.0376", _METADATA),
    SSRFTarget("169.254.43518", _METADATA),
    SSRFTarget("100.100.100.200", "100.100.100.200"),
    SSRFTarget("168.63.129.16", "168.63.129.16"),
    SSRFTarget("192.0.0.192", "192.0.0.192"),
    SSRFTarget("224.0.0.1", "224.0.0.1"),
    SSRFTarget("255.255.255.255", "255.255.255.255"),
    SSRFTarget("240.0.0.1", "240.0.0.1"),
    SSRFTarget("198.18.0.1", "198.18.0.1"),
]

_BRACKETS = [
    SSRFTarget(f"[{host}]", means)
    for host, means in (
        ("::1", "::1"),
        ("0:0:0:0:0:0:0:1", "::1"),
        ("0000::0001", "::1"),
        ("::", "::"),
        ("::ffff:127.0.0.1", "::ffff:127.0.0.1"),
        ("::ffff:7f00:1", "::ffff:127.0.0.1"),
        ("::FFFF:7F00:0001", "::ffff:127.0.0.1"),
        ("::ffff:a9fe:a9fe", "::ffff:169.254.169.254"),
        ("::ffff:0:127.0.0.1", "::ffff:0:7f00:1"),
        ("::127.0.0.1", "::127.0.0.1"),
        ("::7f00:1", "::127.0.0.1"),
        ("64:ff9b::7f00:1", "64:ff9b::7f00:1"),
        ("64:ff9b::169.254.169.254", "64:ff9b::a9fe:a9fe"),
        ("64:ff9b:1::a00:1", "64:ff9b:1::a00:1"),
        ("2002:7f00:1::", "2002:7f00:1::"),
        ("2002:a9fe:a9fe::1", "2002:a9fe:a9fe::1"),
        ("2001:0:7f00:1::", "2001:0:7f00:1::"),
        ("2606:4700::5efe:7f00:1", "2606:4700::5efe:7f00:1"),
        ("2606:4700::200:5efe:10.0.0.1", "2606:4700::200:5efe:a00:1"),
        ("fc00::1", "fc00::1"),
        ("fd00:ec2::254", "fd00:ec2::254"),
        ("fd20:ce::254", "fd20:ce::254"),
        ("fe80::1", "fe80::1"),
        ("fec0::1", "fec0::1"),
        ("ff02::1", "ff02::1"),
        ("2001:db8::1", "2001:db8::1"),
        ("fe80::1%lo", None),
        ("fe80::1%25lo", None),
        ("::1%1", None),
        ("v1.::1", None),
        ("127.0.0.1", None),
    )
]

# IDNA maps these to plain ASCII: an address, or a name to resolve.
_BEYOND_ASCII = [
    SSRFTarget("１２７.０.０.１", _LOOPBACK),
    SSRFTarget("127。0。0。1", _LOOPBACK),
    SSRFTarget("127．0．0．1", _LOOPBACK),
    SSRFTarget("127｡0｡0｡1", _LOOPBACK),
    SSRFTarget("①②⑦.0.0.①", _LOOPBACK),
    SSRFTarget("ⓛⓞⓒⓐⓛⓗⓞⓢⓣ", _LOOPBACK),
    SSRFTarget("ｌｏｃａｌｈｏｓｔ", _LOOPBACK),
    SSRFTarget("loca\u00adlhost"),
    SSRFTarget("０x7f000001", _LOOPBACK),
    SSRFTarget("bücher.example", _LOOPBACK),
    SSRFTarget("١٢٧.٠.٠.١"),
    SSRFTarget("a.example\u2044@127.0.0.1"),
    SSRFTarget("a.example／127.0.0.1"),
    SSRFTarget("127.0.0.1\u200b"),
    SSRFTarget("\ufeff127.0.0.1"),
]

# Refused by syntax: two parsers could see two hosts.
_CONFUSING = [
    SSRFTarget(host)
    for host in (
        "user@127.0.0.1",
        "user:password@127.0.0.1",
        "a.example@127.0.0.1",
        "a.example:443@127.0.0.1",
        "a.example%40127.0.0.1",
        "127.0.0.1@a.example",
        "@127.0.0.1",
        "a.example\\@127.0.0.1",
        "127.0.0.1\\a.example",
        "a.example%00.127.0.0.1",
        "a.example\x00127.0.0.1",
        "a.example\r\nHost: 127.0.0.1",
        "a.example%0d%0aHost:%20127.0.0.1",
        "a.example\t127.0.0.1",
        "a.example 127.0.0.1",
        "127.0.0.1%20a.example",
        "127%2e0%2e0%2e1",
        "%31%32%37.0.0.1",
        "127.0.0.1..",
        "127..0.0.1",
        ".127.0.0.1",
        "*.example",
        "{127.0.0.1}",
        "",
        "a" * 64 + ".example",
        "a." * 130 + "example",
    )
]

# Invalid for `inet_aton`, or an address with a trailing dot: resolved as names.
NOBODY = [
    "127.0.0.1.",
    "256.256.256.256",
    "0x100000000",
    "4294967296",
    "127.0.0.0.1",
    "0x7f.0.0.0x",
    "08.0.0.1",
    "1..1",
]

PLACES: list[SSRFTarget] = list(dict.fromkeys([*_NAMES, *_NUMBERS, *_BRACKETS, *_BEYOND_ASCII, *_CONFUSING]))

# URLs that are refused for their port or scheme.
URLS = [
    "gopher://127.0.0.1/_GET",
    "ftp://127.0.0.1/",
    "file:///etc/passwd",
    "file://localhost/etc/passwd",
    "dict://127.0.0.1:11211/stats",
    "ldap://127.0.0.1/",
    "unix:/run/docker.sock",
    "http+unix://%2Frun%2Fdocker.sock/",
    "jar:http://127.0.0.1!/",
    "data:application/json,{}",
    "javascript:0",
    "ws://127.0.0.1/",
    "//127.0.0.1/",
    "http:127.0.0.1",
    "http:/127.0.0.1/",
    "http:///127.0.0.1/",
    "http:\\\\127.0.0.1\\",
    "http://127.0.0.1:0/",
    "http://127.0.0.1:65616/",
    "http://127.0.0.1:-1/",
    "http://127.0.0.1:８０/",
    "http://127.0.0.1:80:80/",
    "http://127.0.0.1:8 0/",
    "http://127.0.0.1:+80/",
    "http://a.example:80@127.0.0.1:80/",
    " http://127.0.0.1/",
    "http://127.0.0.1/\r\nX: y",
    "h\nttp://127.0.0.1/",
    "\x01http://127.0.0.1/",
]


class ScriptedResolver(FakeResolver):
    """
    Resolver of the corpus: names as scripted, numbers as on the platform, nothing else.

    :ivar script: results of successive lookups of a name; the last one is repeated.
    """

    def __init__(self, script: dict[str, list[Sequence[str]]] | None = None) -> None:
        super().__init__({})
        self.script = script or {}

    def resolveHostName(  # noqa: N802  the interface's name
        self,
        resolutionReceiver: IResolutionReceiver,  # noqa: N803
        hostName: str,  # noqa: N803
        *others: object,
        **more: object,
    ) -> IHostResolution:
        self.known = {hostName: list(self._addresses(hostName))}
        return super().resolveHostName(resolutionReceiver, hostName, *others, **more)  # type: ignore[arg-type]  # passed on

    def _addresses(self, host: str) -> Iterator[str]:
        results = self.script.get(host)
        if results is not None:
            yield from results.pop(0) if len(results) > 1 else results[0]
        elif host in RESOLVING:
            yield from RESOLVING[host] or ()
        else:
            with contextlib.suppress(socket.gaierror):
                found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
                yield from (str(item[4][0]) for item in found)
