"""What passes between the transports and the use cases of the DIDComm half."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from sys import intern
from typing import Any

from mediatord.errors import MediatorError
from mediatord.presence import Session
from mediatord.protocol.didcomm.did import DIDDocument
from mediatord.protocol.didcomm.jwe import Envelope
from mediatord.protocol.didcomm.keys import PrivateKey, PublicKey
from mediatord.protocol.didcomm.message import Message


@dataclass(frozen=True, slots=True)
class Origin:
    """
    Where a message came from.

    :param peer: address of the client, after trusted proxies.
    :param session: its socket; None for an HTTP request.
    :param alien: whether an HTTP request declared a Content-Type that is nothing like an envelope.
    """

    peer: str
    session: Session | None = None
    alien: bool = False


@dataclass(frozen=True, slots=True)
class Correspondent:
    """
    An authenticated peer, and how it spells names: answers mirror that (decision D9).

    :param did: the DID that the encryption proved, did:peer:4 in its short form.
    :param name: the same DID as its messages spell it.
    :param kid: its key, as its messages spell it.
    :param own_kid: our key, as its messages address it.
    :param draft03: it can only read anoncrypt (reference 1.10).
    """

    did: str
    name: str
    kid: str
    key: PublicKey
    own_kid: str
    own_key: PrivateKey = field(repr=False)
    document: DIDDocument = field(repr=False)
    draft03: bool = False


class Reader:
    """
    What is needed to write to a correspondent later, in as little memory as can be: thousands of sockets have one.

    The attributes are those of :class:`Correspondent`. Its document is not among them, and what has the DID in it is
    kept without it, or once for all.
    """

    __slots__ = ("_key_name", "draft03", "key", "name", "own_key", "own_kid")

    def __init__(self, of: Correspondent) -> None:
        self.name = intern(of.name)
        self.key = of.key
        self.own_kid = intern(of.own_kid)
        self.own_key = of.own_key
        self.draft03 = of.draft03
        self._key_name = of.kid.removeprefix(of.name) if of.kid.startswith(f"{of.name}#") else of.kid

    @property
    def kid(self) -> str:
        """Its key, as its messages spell it."""
        return self.name + self._key_name if self._key_name.startswith("#") else self._key_name


@dataclass(frozen=True, slots=True)
class Received:
    """
    An opened message and what the envelope proved about it.

    :param own_kid: our key that opened the outermost layer, as the sender spelled it.
    :param layer: the innermost layer with an authenticated sender, else the innermost.
    :param signer: DID of the verified signature inside, if there was one.
    """

    message: Message
    own_kid: str
    layer: Envelope = field(repr=False)
    correspondent: Correspondent | None = None
    signer: str | None = None

    @property
    def digest(self) -> bytes:
        """
        What a replay is known by, however it is spelled or wrapped anew (reference section 11, row 24).

        Stricter than the digest of the bytes that came, which one blank would change.
        """
        return self.layer.fingerprint()

    @property
    def sender(self) -> str | None:
        """The DID that is proven to have sent it, if any."""
        return self.correspondent.did if self.correspondent else self.signer


@dataclass(frozen=True, slots=True)
class Reply:
    """
    What goes back on the connection a message came on.

    :param status: for HTTP; a socket sends the body as a frame, or nothing when it is empty.
    :param retry_after: seconds.
    :param fault: the situation in which the message was refused, if it was; a class, as an error's traceback would
        keep all that was received.
    :param code: of its problem report, where that is another than the usual one.
    """

    status: int
    body: bytes = field(default=b"", repr=False)
    media_type: str = ""
    retry_after: int | None = None
    fault: type[MediatorError] | None = None
    code: str | None = None


ACCEPTED = Reply(202)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a use case has to say: type, body and attachments of the message that goes back."""

    type: str
    body: Mapping[str, Any]
    attachments: tuple[Mapping[str, Any], ...] = ()
