"""did:web: where its document lies, and when to believe it (reference 8.5). The fetching is done elsewhere."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote_to_bytes

from mediatord.errors import SenderUnresolvable
from mediatord.protocol import jsontext
from mediatord.protocol.didcomm.did import DIDDocument
from mediatord.protocol.didcomm.did_document import parse_document

_PREFIX = "did:web:"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_MAX_HOST = 253
_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class WebLocation:
    """
    Where the document of a did:web lies.

    :param host: a name, or an IPv4 address in some notation; never IPv6.
    :param url: https.
    """

    host: str
    url: str


def web_location(did: str) -> WebLocation:
    """
    Split on colons, decode each part once; without a path the document is in `.well-known`.

    :param did: a did:web by its syntax.
    :raise SenderUnresolvable: a host or port that is none, or a path that would leave its place.
    """
    authority, *path = [_decoded(part) for part in did.removeprefix(_PREFIX).split(":")]
    host, colon, port = authority.partition(":")
    if len(host) > _MAX_HOST or not _HOST.fullmatch(host):
        raise SenderUnresolvable
    if colon and (not _PORT.fullmatch(port) or int(port) > _MAX_PORT):
        raise SenderUnresolvable
    if any(segment in ("", ".", "..") for segment in path):
        raise SenderUnresolvable
    # Encoded again, so that a slash that came as %2F does not become one more segment.
    segments = "/".join(quote(segment, safe="") for segment in path) or ".well-known"
    return WebLocation(host, f"https://{authority}/{segments}/did.json")


def parse_web_document(did: str, raw: bytes) -> DIDDocument:
    """
    The document of a did:web from what its host sent.

    :raise SenderUnresolvable: not a JSON object, or the document of another DID.
    """
    try:
        document = jsontext.loads_object(raw)
    except ValueError:
        raise SenderUnresolvable from None
    if document.get("id") != did:
        raise SenderUnresolvable
    return parse_document(did, document)


def _decoded(part: str) -> str:
    try:
        return unquote_to_bytes(part).decode("utf-8")
    except UnicodeDecodeError:
        raise SenderUnresolvable from None
