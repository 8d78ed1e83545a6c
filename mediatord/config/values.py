"""The kinds of value that a setting can have. Every refusal is a :class:`ValueError` that says what was expected."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Annotated
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, Strict
from twisted.internet.endpoints import quoteStringArgument, serverFromString

from mediatord.endpoint_strings import take_apart
from mediatord.protocol.didcomm.did import did_of, is_did
from mediatord.sizes import parse_size

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?")
_NODE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_HIGHEST_PORT = 65535
# What a database can count to.
_LARGEST_SIZE = 2**63 - 1
_ORIGIN = re.compile(r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^\s/?#@,]*")
_HOST_PORT = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]{1,253})):([0-9]{1,5})")


@dataclass(frozen=True)
class DurationMark:
    """Tells the template that a float is written with a unit."""


@dataclass(frozen=True)
class SizeMark:
    """Tells the template that a whole number is written with a unit."""


@dataclass(frozen=True)
class Kind:
    """
    What operators call such a value, in the reference.

    :param example: one, for error messages; empty where there is none worth showing.
    """

    words: str
    example: str = ""


def _duration(value: object) -> float:
    """Seconds, from a number of them or from `72h` and the like."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str) and (match := _DURATION.fullmatch(value.strip())):
        seconds = float(match[1]) * _UNITS[match[2] or "s"]
    else:
        seconds = math.nan
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError("expected a duration such as 72h, 60s, 500ms or a number of seconds")
    return seconds


def duration_text(seconds: float) -> str:
    """The shortest exact way to write a duration; days only from a week on, so that 72h stays 72h."""
    milliseconds = round(seconds * 1000)
    if milliseconds % 1000:
        return f"{milliseconds}ms"
    whole = milliseconds // 1000
    for unit, size, least in (("d", 86400, 7 * 86400), ("h", 3600, 3600), ("m", 60, 600)):
        if whole >= least and whole % size == 0:
            return f"{whole // size}{unit}"
    return f"{whole}s"


def _size(value: object) -> int:
    """Bytes, from a number of them or from `64MiB` and the like."""
    try:
        size = parse_size(value) if isinstance(value, str) else value
    except ValueError:
        size = None
    if not isinstance(size, int) or isinstance(size, bool):
        raise ValueError("expected a size such as 64MiB, 512k or a number of bytes")
    if size > _LARGEST_SIZE:
        raise ValueError(f"expected at most {_LARGEST_SIZE} bytes")
    return size


def _network(value: object) -> IPv4Network | IPv6Network:
    """An address or a network in CIDR notation."""
    if isinstance(value, IPv4Network | IPv6Network):
        return value
    try:
        if not isinstance(value, str):
            raise ValueError
        return ip_network(value.strip())
    except ValueError:
        raise ValueError("expected an address or a network such as 10.0.0.0/8 or ::1/128") from None


def _server_endpoint(text: str) -> str:
    """A Twisted endpoint string; what it opens is looked at only when the daemon starts."""
    kind, _, arguments = text.partition(":")
    if kind == "systemd" and arguments:
        return text  # Its parser looks for sockets that only systemd hands over.
    try:
        serverFromString(object(), text)
    except Exception as error:  # Each kind of endpoint has a parser of its own, which raises what it likes.
        if not (text.removeprefix("haproxy:").startswith(("ssl:", "tls:")) and _is_about_files(error)):
            raise ValueError("expected a Twisted endpoint string such as tcp:8080:interface=127.0.0.1") from None
    if kind in ("tcp", "tcp6", "ssl") and not 0 <= int(_port_of(arguments)) <= _HIGHEST_PORT:
        raise ValueError("expected a port between 0 and 65535")
    return text


def _is_about_files(error: Exception) -> bool:
    """ssl: and tls: read keys and certificates at once; whether they can be used is not a question of syntax."""
    return not isinstance(error, ValueError | TypeError | LookupError) or "chain file" in str(error)


def _port_of(arguments: str) -> str:
    first = arguments.split(":", 1)[0]
    for argument in arguments.split(":"):
        if argument.startswith("port="):
            first = argument
    return first.removeprefix("port=")


def split_url(text: str) -> SplitResult | None:
    """The parts of an http or https URL with a host; None for anything else."""
    try:
        parts = urlsplit(text)
        if parts.port == 0 or not parts.hostname or parts.scheme not in ("http", "https"):
            return None
    except ValueError:  # a port that is no number, or a bracket that does not close
        return None
    return parts


def _public_url(text: str) -> str:
    """The root of all public addresses, without a slash at its end."""
    parts = split_url(text)
    if parts is None or re.search(r"[\s?#@]", text):
        raise ValueError("expected an http:// or https:// URL with a host, without query, fragment or user")
    return text.rstrip("/")


def _did(text: str) -> str:
    if not is_did(text):
        raise ValueError("expected a DID such as did:web:example.com")
    return text


def _dids(text: str) -> str:
    if not is_did(text.removesuffix(":*")):
        raise ValueError("expected a DID such as did:web:example.com, or did:web:example.com:* for all below it")
    return text


def _did_url(text: str) -> str:
    if not is_did(did_of(text)):
        raise ValueError("expected a did:key or a DID URL that names a key")
    return text


def _url_or_did(text: str) -> str:
    if split_url(text) is None and not is_did(text):
        raise ValueError("expected an http:// or https:// URL, or a DID")
    return text


def _node_name(text: str) -> str:
    if not _NODE.fullmatch(text):
        raise ValueError("expected at most 63 letters, digits, dots, hyphens and underscores")
    return text


def _host_port(text: str) -> str:
    """A host and a port; an IPv6 address in brackets."""
    match = _HOST_PORT.fullmatch(text)
    if match is None or not 0 < int(match[3]) <= _HIGHEST_PORT:
        raise ValueError("expected host:port such as 10.0.0.5:7070")
    return text


def _origin_pattern(text: str) -> str:
    """What browsers send as Origin, perhaps with `*` for a part of it."""
    if not _ORIGIN.fullmatch(text):
        raise ValueError("expected an origin such as https://app.example or https://*.example, null, or * for all")
    return text


def client_endpoint(listen: str, advertise: str | None) -> str | None:
    """
    The Twisted client endpoint string that reaches a server endpoint; None when others cannot know it.

    :param advertise: host:port, where that is not what `listen` says.
    """
    if advertise is not None:
        match = _HOST_PORT.fullmatch(advertise)
        assert match is not None, "it was checked"
        return _tcp(match[1] or match[2], match[3])
    kind, given, named = take_apart(listen)
    if kind == "unix":
        path = named.get("address") or (given[0] if given else "")
        return f"unix:{quoteStringArgument(path)}" if path else None
    host = named.get("interface", "")
    port = named.get("port") or (given[0] if given else "")
    if kind not in ("tcp", "tcp6") or _is_everywhere(host) or port in ("", "0"):
        return None
    return _tcp(host, port)


def _is_everywhere(interface: str) -> bool:
    try:
        return not interface or ip_address(interface).is_unspecified
    except ValueError:  # a name
        return False


def _tcp(host: str, port: str) -> str:
    return f"tcp:host={quoteStringArgument(host)}:port={port}"


def _mongodb_uri(text: str) -> str:
    """Whether the store can do what it asks for is looked at when the store is chosen."""
    if not text.startswith("mongodb://"):
        raise ValueError("expected a mongodb:// URI; mongodb+srv:// is not supported")
    return text


# Part of a whole, more than nothing.
Share = Annotated[float, Strict(), Field(gt=0, le=1), Kind("number, 1 at most")]
# Part of a whole that is set aside three times.
Third = Annotated[float, Strict(), Field(ge=0, le=1 / 3), Kind("number, a third at most")]
Duration = Annotated[float, BeforeValidator(_duration), DurationMark(), Kind("duration")]
Size = Annotated[int, BeforeValidator(_size), Field(ge=1), SizeMark(), Kind("size")]
Count = Annotated[int, Strict(), Field(ge=1)]
Natural = Annotated[int, Strict(), Field(ge=0)]
Switch = Annotated[bool, Strict()]
Network = Annotated[IPv4Network | IPv6Network, BeforeValidator(_network), Kind("address or network", "10.0.0.0/8")]
ServerEndpoint = Annotated[
    str, AfterValidator(_server_endpoint), Kind("Twisted endpoint string", "tcp:8080:interface=127.0.0.1")
]
PublicURL = Annotated[str, AfterValidator(_public_url), Kind("http:// or https:// URL")]
DID = Annotated[str, AfterValidator(_did), Kind("DID", "did:web:example.com")]
DIDs = Annotated[str, AfterValidator(_dids), Kind("DID, or DIDs below one", "did:web:example.com:*")]
DIDURL = Annotated[str, AfterValidator(_did_url), Kind("did:key or DID URL of a key", "did:web:example.com#key-1")]
URLOrDID = Annotated[str, AfterValidator(_url_or_did), Kind("URL or DID", "https://example.com/didcomm")]
HostPort = Annotated[str, AfterValidator(_host_port), Kind("host:port")]
NodeName = Annotated[str, AfterValidator(_node_name), Kind("name of at most 63 characters")]
OriginPattern = Annotated[str, AfterValidator(_origin_pattern), Kind("origin")]
MongoURI = Annotated[str, AfterValidator(_mongodb_uri), Kind("mongodb:// URI")]
