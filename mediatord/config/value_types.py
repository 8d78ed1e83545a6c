"""
Types of the values in the configuration: how each is read, checked and written.

Validators raise :class:`ValueError` with a text of the form "expected ...".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Annotated, Any, get_args
from urllib.parse import SplitResult, urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    Strict,
)
from twisted.internet.endpoints import quoteStringArgument, serverFromString

from mediatord.config.value_syntax import (
    format_duration,
    format_size,
    parse_duration,
    parse_endpoint_string,
    parse_size,
    resolve_endpoint_paths,
)
from mediatord.protocol.didcomm.did_document import is_did, strip_did_url
from mediatord.runtime.secret_files import resolve_secret_path

_NODE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_MAX_PORT = 65535
# Maximum of a signed 64-bit integer, which databases use.
_MAX_SIZE = 2**63 - 1
_ORIGIN = re.compile(r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^\s/?#@,]*")
_HOST_PORT = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]{1,253})):([0-9]{1,5})")


@dataclass(frozen=True)
class ValueKind:
    """
    A type of values.

    :param words: its name in the reference manual.
    :param example: used in error messages; may be empty.
    :param format: how values are written, if not as plain YAML.
    :param resolve: resolves paths in a value against a directory, which comes first; None if it has none.
    """

    words: str
    example: str = ""
    format: Callable[[Any], str] | None = None
    resolve: Callable[[Path, Any], Any] | None = None


def find_value_kind(annotation: Any, marks: Sequence[object] = ()) -> ValueKind | None:
    """The kind of a type, of the alternatives of a union, or of the items of a list. :param marks: of a field."""
    for mark in (*marks, *getattr(annotation, "__metadata__", ())):
        if isinstance(mark, ValueKind):
            return mark
    found = map(find_value_kind, get_args(annotation))
    return next((one for one in found if one is not None), None)


def _require(is_valid: Callable[[str], object], expected: str) -> AfterValidator:
    """A check of text. :param expected: what the error message asks for."""

    def check(text: str) -> str:
        if not is_valid(text):
            raise ValueError(f"expected {expected}")
        return text

    return AfterValidator(check)


def _parse_size_value(value: object) -> int:
    """Number of bytes, from an integer or a text such as `64MiB`."""
    try:
        size = parse_size(value) if isinstance(value, str) else value
    except ValueError:
        size = None
    if not isinstance(size, int) or isinstance(size, bool):
        raise ValueError("expected a size such as 64MiB, 512k or a number of bytes")
    if size > _MAX_SIZE:
        raise ValueError(f"expected at most {_MAX_SIZE} bytes")
    return size


def _parse_network(value: object) -> IPv4Network | IPv6Network:
    """An address, or a network in CIDR notation."""
    if isinstance(value, IPv4Network | IPv6Network):
        return value
    try:
        if not isinstance(value, str):
            raise ValueError
        return ip_network(value.strip())
    except ValueError as error:
        if isinstance(value, str) and "host bits" in str(error):
            raise ValueError(
                f"expected a network without host bits: {ip_network(value.strip(), strict=False)}"
            ) from None
        raise ValueError("expected an address or a network such as 10.0.0.0/8 or ::1/128") from None


def _check_server_endpoint(text: str) -> str:
    """Syntax of a Twisted endpoint string; the address is checked when the daemon starts."""
    kind, _, arguments = text.partition(":")
    if kind == "systemd" and arguments:
        return text  # its parser requires sockets passed by systemd
    try:
        serverFromString(object(), text)
    except Exception as error:  # parsers of endpoint types raise arbitrary exceptions
        if not (text.removeprefix("haproxy:").startswith(("ssl:", "tls:")) and _is_file_error(error)):
            raise ValueError("expected a Twisted endpoint string such as tcp:8080:interface=127.0.0.1") from None
    if kind in ("tcp", "tcp6", "ssl") and not 0 <= int(_find_port(text)) <= _MAX_PORT:
        raise ValueError("expected a port between 0 and 65535")
    return text


def _is_file_error(error: Exception) -> bool:
    """Whether an error of `ssl:` or `tls:` is about reading key or certificate, and not about syntax."""
    return not isinstance(error, ValueError | TypeError | LookupError) or "chain file" in str(error)


def _find_port(endpoint: str) -> str:
    """Empty if there is none."""
    _, given, named = parse_endpoint_string(endpoint)
    return named.get("port") or (given[0] if given else "")


def split_url(text: str) -> SplitResult | None:
    """Parts of an http or https URL with a host; None for anything else."""
    try:
        parts = urlsplit(text)
        if parts.port == 0 or not parts.hostname or parts.scheme not in ("http", "https"):
            return None
    except ValueError:  # an invalid port, or an unclosed bracket
        return None
    return parts


def _check_public_url(text: str) -> str:
    """The root of all public addresses, without trailing slash."""
    parts = split_url(text)
    if parts is None or re.search(r"[\s?#@]", text):
        raise ValueError("expected an http:// or https:// URL with a host, without query, fragment or user name")
    return text.rstrip("/")


def _is_endpoint_url(text: str) -> bool:
    parts = split_url(text)
    return parts is not None and "@" not in parts.netloc and not re.search(r"[\s#]", text)


def _is_url_or_did(text: str) -> bool:
    return split_url(text) is not None or is_did(text)


def _is_host_port(text: str) -> bool:
    match = _HOST_PORT.fullmatch(text)
    return match is not None and 0 < int(match[3]) <= _MAX_PORT


def make_client_endpoint(listen: str, advertise: str | None) -> str | None:
    """
    Twisted client endpoint string for a server endpoint; None if it is not reachable for others.

    :param advertise: host:port that overrides `listen`.
    """
    if advertise is not None:
        match = _HOST_PORT.fullmatch(advertise)
        assert match is not None, "it was checked"
        return _format_tcp_endpoint(match[1] or match[2], match[3])
    kind, given, named = parse_endpoint_string(listen)
    if kind == "unix":
        path = named.get("address") or (given[0] if given else "")
        return f"unix:{quoteStringArgument(path)}" if path else None
    host, port = named.get("interface", ""), _find_port(listen)
    if kind not in ("tcp", "tcp6") or _is_wildcard_address(host) or port in ("", "0"):
        return None
    return _format_tcp_endpoint(host, port)


def _is_wildcard_address(interface: str) -> bool:
    try:
        return not interface or ip_address(interface).is_unspecified
    except ValueError:  # a name
        return False


def _format_tcp_endpoint(host: str, port: str) -> str:
    return f"tcp:host={quoteStringArgument(host)}:port={port}"


# A fraction above 0.
Fraction = Annotated[float, Strict(), Field(gt=0, le=1), ValueKind("number")]
# A fraction that is reserved three times.
FractionUpToThird = Annotated[float, Strict(), Field(ge=0, le=1 / 3), ValueKind("number")]
Duration = Annotated[float, BeforeValidator(parse_duration), ValueKind("duration", format=format_duration)]
Size = Annotated[int, BeforeValidator(_parse_size_value), Field(ge=1), ValueKind("size", format=format_size)]
PositiveInteger = Annotated[int, Strict(), Field(ge=1)]
NonNegativeInteger = Annotated[int, Strict(), Field(ge=0)]
Boolean = Annotated[bool, Strict()]
CIDRNetwork = Annotated[
    IPv4Network | IPv6Network, BeforeValidator(_parse_network), ValueKind("address or network", "10.0.0.0/8")
]
ServerEndpoint = Annotated[
    str,
    AfterValidator(_check_server_endpoint),
    ValueKind("Twisted endpoint string", "tcp:8080:interface=127.0.0.1", resolve=resolve_endpoint_paths),
]
SecretPath = Annotated[Path, ValueKind("path", resolve=resolve_secret_path)]
PublicURL = Annotated[str, AfterValidator(_check_public_url), ValueKind("http:// or https:// URL")]
# As it is: it may have a path and a query, and a slash at its end.
EndpointURL = Annotated[
    str,
    _require(_is_endpoint_url, "an http:// or https:// URL with a host, without fragment or user name"),
    ValueKind("http:// or https:// URL"),
]
DID = Annotated[str, _require(is_did, "a DID such as did:web:example.com"), ValueKind("DID", "did:web:example.com")]
DIDPattern = Annotated[
    str,
    _require(
        lambda text: is_did(text.removesuffix(":*")),
        "a DID such as did:web:example.com, or did:web:example.com:* for all below it",
    ),
    ValueKind("DID or DID prefix", "did:web:example.com:*"),
]
DIDURL = Annotated[
    str,
    _require(lambda text: is_did(strip_did_url(text)), "a did:key, or a DID URL with the id of a key"),
    ValueKind("did:key or DID URL of a key", "did:web:example.com#key-1"),
]
URLOrDID = Annotated[
    str,
    _require(_is_url_or_did, "an http:// or https:// URL, or a DID"),
    ValueKind("URL or DID", "https://example.com/didcomm"),
]
# IPv6 addresses are in brackets.
HostPort = Annotated[str, _require(_is_host_port, "host:port such as 10.0.0.5:7070"), ValueKind("host:port")]
NodeName = Annotated[
    str,
    _require(
        _NODE.fullmatch, "1 to 63 letters, digits, dots, hyphens or underscores, with a letter or digit at both ends"
    ),
    ValueKind("name of at most 63 characters"),
]
# An Origin header of browsers; `*` may stand for a part of it.
OriginPattern = Annotated[
    str,
    _require(_ORIGIN.fullmatch, "an origin such as https://app.example or https://*.example, null, or * for all"),
    ValueKind("origin"),
]
# Options of the URI are checked when the store is built.
MongoURI = Annotated[
    str,
    _require(lambda text: text.startswith("mongodb://"), "a mongodb:// URI; mongodb+srv:// is not supported"),
    ValueKind("mongodb:// URI"),
]
