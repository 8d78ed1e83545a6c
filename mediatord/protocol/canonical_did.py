"""
Canonical form of DIDs: one spelling for all forms of a DID and for all its DID URLs.

Used wherever DIDs are compared: commands, access lists, and keys of stores.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from hashlib import blake2b, sha256
from urllib.parse import quote, unquote

from mediatord.protocol import encoding
from mediatord.protocol.decentrl.did_decentrl import make_did, parse_did

DIGEST_BYTES = 16

# Fast check for the common forms, which have only one spelling.
_CANONICAL_ALREADY = re.compile(r"did:(?:key:z|peer:[023])[A-Za-z0-9._-]*+")
_DID = re.compile(r"did:([a-z0-9]++):(.++)", re.DOTALL)
# Includes the `;` parameters of former drafts of DID Core.
_URL_PART = re.compile(r"[/?#;]")
_ESCAPE = re.compile(r"%[0-9A-Fa-f]{2}")
_UNRESERVED = re.compile(r"[A-Za-z0-9._~-]")
_SIMPLE = re.compile(r"[A-Za-z0-9._:=-]*+")
_STRAY_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_KEY_VERSION = re.compile(r"[0-9.]++:(?=z)")
_PRISM_LONG = re.compile(r"([0-9a-f]{64}):.*+", re.DOTALL)
# Longer DIDs are rejected everywhere.
_MAX_LENGTH = 32_768
_DECENTRL = "did:decentrl:"
_PEER_2 = "did:peer:2"
DID_PEER_3 = "did:peer:3"
# Multibase prefix and base58 digits of the hash.
_PEER_3_LENGTH = len(DID_PEER_3) + 1 + 46


def canonicalize_did(did_url: str) -> str:
    """
    The canonical spelling of the DID in a DID or DID URL.

    A did:peer:4 is shortened; a did:web gets a lower-case host without the default port. Text that is no DID is
    returned unchanged. A did:peer:2 and its did:peer:3 are the same DID, but both spellings are canonical, because
    the keys are needed: compare :func:`compute_did_digest` or use :func:`is_same_did`.
    """
    return did_url if _CANONICAL_ALREADY.fullmatch(did_url) else _normalize(did_url)


def is_decentrl_did(did: str) -> bool:
    """Whether a DID is that of a Decentrl identity, by its method."""
    return did.startswith(_DECENTRL)


def compute_did_digest(did_url: str) -> bytes:
    """16 bytes that are equal for all forms and DID URLs of one DID, and different for any other DID."""
    did = canonicalize_did(did_url)
    if did.startswith(_PEER_2):
        did = DID_PEER_3 + encoding.encode_multihash(did[len(_PEER_2) :].rstrip("=").encode("utf-8", "surrogatepass"))
    return blake2b(did.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def make_did_comparison_key(did: str) -> str:
    """
    A text that is equal for all canonical forms of one DID, for comparison only; it need not be a DID.

    Takes a tenth of the time of :func:`compute_did_digest`.

    :param did: canonical.
    """
    if did.startswith(_PEER_2):
        hashed = sha256(did[len(_PEER_2) :].rstrip("=").encode("utf-8", "surrogatepass"))
        return f"{DID_PEER_3} {hashed.hexdigest()}"
    if did.startswith(DID_PEER_3) and len(did) == _PEER_3_LENGTH:
        try:
            decoded = encoding.decode_base58(did[len(DID_PEER_3) + 1 :])
        except ValueError:
            return did
        if did[len(DID_PEER_3)] == "z" and decoded.startswith(encoding.SHA2_256_MULTIHASH):
            return f"{DID_PEER_3} {decoded[len(encoding.SHA2_256_MULTIHASH) :].hex()}"
    return did


def is_same_did(one: str, other: str) -> bool:
    """Whether two DIDs or DID URLs name the same DID."""
    return one == other or compute_did_digest(one) == compute_did_digest(other)


def is_did_peer_3(did: str) -> bool:
    """Whether a canonical form has another canonical form, a did:peer:2; it must not serve as a cache key."""
    return did.startswith(DID_PEER_3)


def _normalize(did_url: str) -> str:
    if len(did_url) > _MAX_LENGTH:
        return did_url
    if did_url.startswith(_DECENTRL):
        return _normalize_decentrl(did_url)
    matched = _DID.fullmatch(_strip_url_parts(did_url)) if did_url.startswith("did:") else None
    if matched is None:
        return did_url
    method, specific = matched.groups()
    return f"did:{method}:{_NORMALIZERS.get(method, _normalize_escapes)(specific)}"


def _strip_url_parts(did_url: str) -> str:
    return _URL_PART.split(did_url, maxsplit=1)[0]


def _normalize_escapes(specific: str) -> str:
    """Normalise percent-encoding (RFC 3986, 6.2.2): unescape unreserved characters, escape in upper case."""

    def spelling(escape: re.Match[str]) -> str:
        character = chr(int(escape[0][1:], 16))
        return character if _UNRESERVED.fullmatch(character) else escape[0].upper()

    return specific if "%" not in specific or _STRAY_PERCENT.search(specific) else _ESCAPE.sub(spelling, specific)


def _unescape(specific: str) -> str:
    """Unescape an identifier of a method whose identifiers need no escapes."""
    plain = _strip_url_parts(unquote(specific)) if "%" in specific else specific
    return plain if _SIMPLE.fullmatch(plain) else specific


def _normalize_key(specific: str) -> str:
    specific = _unescape(specific)
    version = _KEY_VERSION.match(specific)
    return specific[version.end() :] if version else specific


def _unescape_and_shorten(specific: str, shorten: Callable[[str], str]) -> str:
    """Unescape and shorten, twice: what could not be unescaped may have been in the part that is cut off."""
    return shorten(_unescape(shorten(_unescape(specific))))


def _normalize_peer(specific: str) -> str:
    return _unescape_and_shorten(specific, lambda did: did.partition(":")[0] if did.startswith("4") else did)


def _normalize_host(authority: str) -> str:
    """:param authority: unescaped host, with an optional port."""
    host, colon, port = authority.lower().partition(":")
    return quote(host.rstrip(".") + ("" if port in ("", "443") else colon + port), safe="")


def _normalize_web(specific: str) -> str:
    authority, *path = specific.split(":")
    try:
        segments = [quote(unquote(one, errors="surrogateescape"), "", errors="surrogateescape") for one in path]
        return ":".join([_normalize_host(unquote(authority)), *([] if segments == [".well-known"] else segments)])
    except UnicodeEncodeError:
        return specific  # a lone surrogate, which no DID contains


def _normalize_webvh(specific: str) -> str:
    identifier, _, location = _normalize_escapes(specific).partition(":")
    return f"{identifier}:{_normalize_web(location)}" if location else identifier


def _lower_case(specific: str) -> str:
    return _normalize_escapes(specific).lower()


def _normalize_pkh(specific: str) -> str:
    """Addresses on Ethereum chains are hexadecimal; upper case is only a checksum."""
    specific = _normalize_escapes(specific)
    return specific.lower() if specific.startswith("eip155:") else specific


def _normalize_prism(specific: str) -> str:
    return _unescape_and_shorten(specific, lambda did: _PRISM_LONG.sub(r"\1", did))


def _normalize_ion(specific: str) -> str:
    def shorten(did: str) -> str:
        parts = did.split(":")
        return ":".join(parts[: 2 if parts[0] in ("test", "main") else 1])

    return _unescape_and_shorten(specific, shorten)


def _normalize_decentrl(did_url: str) -> str:
    """Unify alphabets, padding and prefixes. Tried before URL parts are stripped, since a slash is a base64 digit."""
    for text in (did_url, _strip_url_parts(did_url)):
        try:
            did = parse_did(text)
            return make_did(did.alias, did.signing_key, did.prekey, did.mediator_did)
        except ValueError:
            continue
    return _strip_url_parts(did_url)


_NORMALIZERS: dict[str, Callable[[str], str]] = {
    "dns": _lower_case,
    "ethr": _lower_case,
    "ion": _normalize_ion,
    "key": _normalize_key,
    "peer": _normalize_peer,
    "pkh": _normalize_pkh,
    "prism": _normalize_prism,
    "tdw": _normalize_webvh,
    "web": _normalize_web,
    "webvh": _normalize_webvh,
}
