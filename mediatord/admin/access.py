"""Who may see the page: those who know the token."""

from __future__ import annotations

import binascii
import hmac
from base64 import b64decode
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from twisted.internet.interfaces import IReactorTime

from mediatord.private_file import PrivateFileError, read_private
from mediatord.protocol.limits import SlidingWindow

LEAST = 32
# Wrong tokens that one address may try in a minute, and addresses that are remembered.
_TRIES = 10
_ADDRESSES = 1_000


@dataclass(frozen=True, slots=True)
class Token:
    """:param digest: of the token, so that comparing takes as long for one of any length."""

    digest: bytes = field(repr=False)

    @classmethod
    def of(cls, secret: bytes) -> Token:
        """Of the token itself."""
        return cls(sha256(secret).digest())

    def is_in(self, authorization: bytes) -> bool:
        """Whether the value of an `Authorization` header has it: as Bearer, or as the password of Basic."""
        return hmac.compare_digest(sha256(_secret_in(authorization)).digest(), self.digest)


def read_token(path: Path) -> Token:
    """
    The token in a file; white space around it does not count.

    :raise PrivateFileError: it cannot be read, is open to others, or too short to be a secret.
    """
    secret = read_private(path).strip()
    if len(secret) < LEAST:
        raise PrivateFileError(f"{path} holds less than {LEAST} characters; type: openssl rand -hex 32 > {path}")
    if not (secret.isascii() and secret.decode("ascii").isprintable()) or b" " in secret:
        raise PrivateFileError(
            f"{path} has to hold one line of ASCII without spaces; type: openssl rand -hex 32 > {path}"
        )
    return Token.of(secret)


def _secret_in(authorization: bytes) -> bytes:
    """Empty where there is none, which no token is."""
    scheme, _, value = authorization.strip().partition(b" ")
    value = value.strip()
    if scheme.lower() == b"bearer":
        return value
    if scheme.lower() != b"basic":
        return b""
    try:
        return b64decode(value, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


@dataclass(frozen=True, slots=True)
class Turned:
    """
    A client that is not let in.

    :param wait: seconds until it may try again; 0 when it may at once.
    """

    wait: int = 0


class Door:
    """Lets in who shows the token, and has an address that shows wrong ones wait, whatever it shows then."""

    def __init__(self, clock: IReactorTime, token: Token) -> None:
        self._clock = clock
        self._token = token
        self._wrong = SlidingWindow(_TRIES, max_keys=_ADDRESSES)

    def use(self, token: Token) -> None:
        """From now on it is this one."""
        self._token = token

    def knock(self, payer: str, authorization: bytes | None) -> Turned | None:
        """
        None when the client may come in.

        :param payer: address that tries are counted for.
        :param authorization: value of the header; None without one, which browsers ask their user for then.
        """
        now = self._clock.seconds()
        wait = self._wrong.wait(payer, now)
        if wait:
            return Turned(wait)
        if authorization is None:
            return Turned()
        if self._token.is_in(authorization):
            return None
        self._wrong.admit(payer, now)
        return Turned()
