"""The mediator's private keys: a JWK set in a file of mode 0600 (reference section 9)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mediatord.private_file import PrivateFileError, create_private, read_private
from mediatord.protocol import jsontext
from mediatord.protocol.didcomm.keys import Curve, PrivateKey

# The ids are fragments of our did:web; the first two are those that Decentrl prescribes.
_FRESH: tuple[tuple[str, Curve], ...] = (
    ("prekey", "X25519"),
    ("signing", "Ed25519"),
    ("p256", "P-256"),
    ("p384", "P-384"),
    ("p521", "P-521"),
)
_KID = re.compile(r"[A-Za-z0-9._~-]{1,100}")


@dataclass(frozen=True, slots=True)
class KeySet:
    """
    Keys in the order of the file; of each curve the first is the current one, the others open what old DIDs bring.

    :param keys: pairs of key id and key.
    """

    keys: tuple[tuple[str, PrivateKey], ...] = field(repr=False)

    def first(self, curve: Curve) -> tuple[str, PrivateKey] | None:
        """Id and key of the current key of a curve."""
        return next(((kid, key) for kid, key in self.keys if key.curve == curve), None)

    def __iter__(self) -> Iterator[tuple[str, PrivateKey]]:
        return iter(self.keys)


def generate_keys() -> KeySet:
    """A fresh key of every curve that is served."""
    return KeySet(tuple((kid, PrivateKey.generate(curve)) for kid, curve in _FRESH))


def create_keys(path: Path) -> KeySet:
    """
    Make the file with fresh keys.

    :raise PrivateFileError: it is there already or cannot be written.
    """
    keys = generate_keys()
    # One key a line: a person may have to look at the file.
    lines = b",\n".join(jsontext.dumps({"kid": kid, **key.jwk()}) for kid, key in keys)
    create_private(path, b'{"keys": [\n' + lines + b"\n]}\n")
    return keys


def load_keys(path: Path) -> KeySet:
    """
    Read the file.

    :raise PrivateFileError: it is missing, open to others, or no set of private keys with an X25519 and an Ed25519
        key in it.
    """
    raw = read_private(path)
    try:
        keys = KeySet(tuple(_read_key(jwk) for jwk in jsontext.loads_object(raw)["keys"]))
    except (ValueError, TypeError, KeyError):
        raise PrivateFileError(f"{path} is not a set of private keys: expected a JWK set with kid and d") from None
    if keys.first("X25519") is None or keys.first("Ed25519") is None:
        raise PrivateFileError(f"{path} lacks a key: expected an X25519 and an Ed25519 key at least")
    if len({kid for kid, _ in keys}) != len(keys.keys):
        raise PrivateFileError(f"{path} has two keys of one kid: expected each kid once")
    return keys


def _read_key(jwk: dict[str, object]) -> tuple[str, PrivateKey]:
    kid = jwk["kid"]
    if not isinstance(kid, str) or not _KID.fullmatch(kid):
        raise ValueError("not a kid")
    return kid, PrivateKey.from_jwk(jwk)
