"""A Decentrl mediator as a wallet sees it: found by URL or DID, described by its DID document (reference 3)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from twisted.web.client import ResponseFailed, ResponseNeverReceived

from mediatord.errors import SenderUnresolvable
from mediatord.protocol.decentrl.did import KeyKind, decode_multibase_key, parse_did
from mediatord.protocol.didcomm.did_web import web_location
from mediatord.wallet.mediator import HTTP, get_json
from mediatord.wallet.packing import Unreadable

_SERVICE = "#mediator-service"
_LOOPBACK = ("127.0.0.1", "localhost")


@dataclass(frozen=True, slots=True)
class Mediator:
    """
    :param url: where commands are POSTed.
    :param signing_key: Ed25519 public key.
    :param prekey: X25519 public key that registrations are encrypted to.
    """

    did: str
    url: str
    signing_key: bytes = field(repr=False)
    prekey: bytes = field(repr=False)

    @property
    def ws_url(self) -> str:
        """Where a socket is opened."""
        scheme, _, rest = self.url.partition("://")
        return f"{'wss' if scheme == 'https' else 'ws'}://{rest.rstrip('/')}/ws"

    def public_url(self, publisher_did: str) -> str:
        """Where the public channels of a DID are read; the DID stands there as it is (reference 10.3)."""
        return f"{self.url.rstrip('/')}/public/{publisher_did}"


def read_document(document: dict[str, Any]) -> Mediator:
    """
    The mediator that a DID document describes (DCTRL-0004 3.2).

    :raise Unreadable: it has not all that a wallet needs.
    """
    try:
        did = str(document["id"])
        service = _entry(document["service"], _SERVICE, did + _SERVICE)
        return Mediator(
            did,
            str(service["serviceEndpoint"]["uri"]),
            _key(_entry(document["verificationMethod"], f"{did}#signing"), "Ed25519"),
            _key(_entry(document["keyAgreement"], f"{did}#prekey"), "X25519"),
        )
    except (KeyError, TypeError, ValueError):
        raise Unreadable("not the document of a Decentrl mediator") from None


def _entry(entries: list[Any], *ids: str) -> dict[str, Any]:
    """Between them may be what is meant for others, references by id included."""
    for one in entries:
        if isinstance(one, dict) and one.get("id") in ids:
            return one
    raise KeyError


def _key(method: dict[str, Any], kind: KeyKind) -> bytes:
    return decode_multibase_key(str(method["publicKeyMultibase"]), kind)


async def discover(http: HTTP, url: str) -> Mediator:
    """
    The mediator at a URL.

    :raise Unreadable: there is none.
    """
    return read_document(await get_json(http, f"{url.rstrip('/')}/.well-known/did.json"))


async def resolve(http: HTTP, did: str) -> Mediator:
    """
    The mediator of a did:web; on the loopback interface without TLS, unless it insists on that.

    :raise Unreadable: some other DID, or there is nothing where it points.
    """
    if not did.startswith("did:web:"):
        raise Unreadable("a mediator that is no did:web")
    try:
        location = web_location(did)
    except SenderUnresolvable:
        raise Unreadable("a did:web that points nowhere") from None
    found = read_document(await _document(http, location.url, location.host in _LOOPBACK))
    if found.did != did:
        raise Unreadable("the document of another mediator")
    return found


async def _document(http: HTTP, url: str, near: bool) -> dict[str, Any]:
    if near:
        try:
            return await get_json(http, f"http{url.removeprefix('https')}")
        except (ResponseNeverReceived, ResponseFailed):
            pass  # It hangs up on whoever does not speak TLS.
    return await get_json(http, url)


class Directory:
    """
    Whose keys are whose, and which mediator answers for whom.

    A did:decentrl says both itself; a mediator is known once its document has been read.
    """

    def __init__(self, http: HTTP) -> None:
        self._http = http
        self._known: dict[str, Mediator] = {}

    def learn(self, mediator: Mediator) -> None:
        """Remember it."""
        self._known[mediator.did] = mediator

    async def mediator_of(self, did: str) -> Mediator:
        """
        The mediator that a did:decentrl names.

        :raise Unreadable: it names none, or one that cannot be found.
        """
        try:
            mediator_did = parse_did(did).mediator_did
        except ValueError:
            raise Unreadable("not a did:decentrl") from None
        if mediator_did not in self._known:
            self.learn(await resolve(self._http, mediator_did))
        return self._known[mediator_did]

    def signing_key(self, did: str, key_id: str) -> bytes | None:
        """The Ed25519 public key of this id; None where there is none."""
        if key_id != f"{did}#signing":
            return None
        if did in self._known:
            return self._known[did].signing_key
        try:
            return parse_did(did).signing_key
        except ValueError:
            return None
