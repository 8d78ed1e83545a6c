"""The mediator behind a URL, of any make: by its DID, its invitation or its did:web (reference 7.4, 8.4)."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

from mediatord.errors import MediatorError
from mediatord.protocol.didcomm.did_document import parse_document
from mediatord.wallet.mediator import Mediator
from mediatord.wallet.packing import Unreadable

_TIMEOUT_SECONDS = 30
_MOST_BYTES = 1 << 20


def find_mediator(url: str, did: str | None = None) -> Mediator:
    """
    Ask at a URL who is there.

    :param url: of the mediator, or of an out-of-band invitation of it.
    :param did: its DID, if that is known.
    :raise RuntimeError: nothing there says who it is, or its DID does not resolve.
    """
    for found in [did] if did else _dids_at(url):
        try:
            return _resolved(found, url)
        except (LookupError, MediatorError, Unreadable, ValueError, OSError):
            continue
    raise RuntimeError(f"no DIDComm mediator is known at {url}: give its DID by --target-did")


def _dids_at(url: str) -> Iterator[str]:
    invitation = parse_qs(urlsplit(url).query).get("_oob")
    if invitation:
        yield _inviter(base64.urlsafe_b64decode(invitation[0] + "=="))
        return
    root = url.rstrip("/")
    for place in (f"{root}/did", f"{root}/invitation", root, f"{root}/.well-known/did.json"):
        try:
            text = _get(place)
        except (OSError, ValueError):
            continue
        if text.startswith(b"did:"):
            yield text.decode("ascii", "replace").strip()
        elif did := _inviter(text):
            yield did


def _inviter(text: bytes) -> str:
    """`from` of an invitation, or `id` of a DID document; empty if it is neither."""
    try:
        value: Any = json.loads(text)
    except ValueError:
        return ""
    found = value.get("from", value.get("id")) if isinstance(value, dict) else None
    return found if isinstance(found, str) and found.startswith("did:") else ""


def _resolved(did: str, url: str) -> Mediator:
    if not did.startswith("did:web:"):
        return Mediator.from_did(did)
    parts = urlsplit(url)
    document = json.loads(_get(f"{parts.scheme}://{parts.netloc}/.well-known/did.json"))
    return Mediator.of(parse_document(did, document))


def _get(url: str) -> bytes:
    request = urllib.request.Request(url, headers={"Accept": "application/json, text/plain"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
            content: bytes = response.read(_MOST_BYTES)
            return content
    except urllib.error.URLError as error:
        raise OSError(str(error.reason)) from None
