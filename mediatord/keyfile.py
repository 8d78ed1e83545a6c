"""
The mediator's private keys: a JWK set in a file of mode 0600 (reference section 9), which may be encrypted
(:mod:`mediatord.keylock`). Whatever changes an encrypted file leaves it encrypted, by the same passphrase.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from mediatord.keylock import Passphrase, is_locked, lock, passphrase_from, unlock
from mediatord.keyset import Generation, KeySet, NamedKey, Root
from mediatord.private_file import PrivateFileError, create_private, locked, read_private, replace_private
from mediatord.protocol import jsontext
from mediatord.protocol.didcomm.keys import Curve, PrivateKey, PublicKey

__all__ = [
    "Generation",
    "KeySet",
    "Root",
    "create_keys",
    "decrypt_keys",
    "encrypt_keys",
    "generate_keys",
    "load_keys",
    "read_keys",
    "retire_keys",
    "rotate_keys",
    "write_keys",
]

_NO_PASSPHRASE = passphrase_from(None)

# The ids are fragments of our did:web; the first two are those that Decentrl prescribes.
_FRESH: tuple[tuple[str, Curve], ...] = (
    ("prekey", "X25519"),
    ("signing", "Ed25519"),
    ("p256", "P-256"),
    ("p384", "P-384"),
    ("p521", "P-521"),
)
_KID = re.compile(r"[A-Za-z0-9._~-]{1,100}")
_NUMBERED = re.compile(rf"(?:{'|'.join(name for name, _ in _FRESH)})-([1-9][0-9]{{0,8}})")

JWK = dict[str, Any]


def generate_keys() -> KeySet:
    """A fresh key of every curve that is served."""
    return KeySet(tuple((kid, PrivateKey.generate(curve)) for kid, curve in _FRESH))


def create_keys(path: Path) -> KeySet:
    """
    Make the file with fresh keys.

    :raise PrivateFileError: it is there already or cannot be written.
    """
    keys = generate_keys()
    create_private(path, write_keys(keys))
    return keys


def load_keys(path: Path, passphrase: Passphrase = _NO_PASSPHRASE) -> KeySet:
    """
    Read the file.

    :param passphrase: gives that of a file, if it is encrypted.
    :raise PrivateFileError: it is missing, open to others, does not open, or is no set of private keys with an X25519
        and an Ed25519 key in it.
    """
    return _load_to_change(path, passphrase)[1]


def encrypt_keys(path: Path, passphrase: bytes) -> None:
    """
    Encrypt the file, after looking whether it can be opened again.

    :raise PrivateFileError: it cannot be used or written, or is encrypted already.
    """
    path = path.resolve()
    with locked(path):
        content = read_private(path)
        if is_locked(content):
            raise PrivateFileError(f"{path} is encrypted already; decrypt it first")
        read_keys(content, path)
        replace_private(path, lock(content, passphrase))


def decrypt_keys(path: Path, passphrase: Passphrase) -> None:
    """
    Have the file in the clear again.

    :raise PrivateFileError: it cannot be used or written, does not open, or is not encrypted.
    """
    path = path.resolve()
    with locked(path):
        content = read_private(path)
        if not is_locked(content):
            raise PrivateFileError(f"{path} is not encrypted")
        content = unlock(content, passphrase(path), path)
        read_keys(content, path)
        replace_private(path, content)


def write_keys(keys: KeySet) -> bytes:
    """The content of a file with these keys, for :func:`read_keys`: a secret."""
    document: dict[str, Any] = {} if keys.retired_root is None else {"root": _root_members(keys.retired_root)}
    prepared = [{"kid": kid, "prepared": True, **key.jwk()} for kid, key in keys.prepared]
    return _rendered({**document, "keys": [{"kid": kid, **key.jwk()} for kid, key in keys.keys] + prepared})


def read_keys(content: bytes, name: object) -> KeySet:
    """
    The keys in the content of a file.

    :param name: of the file, for the text of the error.
    :raise PrivateFileError: as :func:`load_keys`.
    """
    return _read(_object(content, name), name)


def rotate_keys(
    path: Path,
    check: Callable[[KeySet], object],
    *,
    prepare: bool = False,
    passphrase: Passphrase = _NO_PASSPHRASE,
) -> KeySet:
    """
    Make the prepared keys the current ones, or fresh ones of the same curves where none are prepared.

    :param check: raises to leave the file as it is.
    :param prepare: only prepare fresh ones.
    :param passphrase: as of :func:`load_keys`.
    :raise PrivateFileError: the file cannot be used or written; or keys are prepared already.
    """
    path = path.resolve()
    with locked(path):
        document, keys, replace = _load_to_change(path, passphrase)
        if prepare and keys.prepared:
            raise PrivateFileError(f"{path} has prepared keys already; rotate makes them the current ones")
        jwks: list[JWK] = document["keys"]
        coming = [one for one in jwks if _is_prepared(one)]
        others = [one for one in jwks if not _is_prepared(one)]
        if prepare:
            # After the current ones: an earlier release would take them for former keys.
            others += [{**one, "prepared": True} for one in _fresh(keys)]
        else:
            fresh = [_without(one, "prepared") for one in coming] if coming else _fresh(keys)
            others = [*fresh, *others]
        return replace({**document, "keys": others}, check)


def retire_keys(
    path: Path,
    kid: str,
    check: Callable[[KeySet], object],
    *,
    really: bool = True,
    passphrase: Passphrase = _NO_PASSPHRASE,
) -> tuple[Generation, KeySet]:
    """
    Delete the former or prepared keys that were made together with one of them.

    :param kid: of any of them.
    :param check: raises to leave the file as it is.
    :param really: False only finds out what would be deleted, and what left.
    :param passphrase: as of :func:`load_keys`.
    :return: what is deleted, and what is left.
    :raise PrivateFileError: there is no such key, or it is current; the file cannot be used or written.
    """
    path = path.resolve()
    with locked(path):
        document, keys, replace = _load_to_change(path, passphrase)
        current, *former = keys.generations
        gone = next((one for one in (*former, *keys.prepared_generations) if kid in one.kids), None)
        if gone is None:
            if kid in current.kids:
                raise PrivateFileError(f"{kid} is a current key, which cannot be retired; rotate first")
            raise PrivateFileError(f"{path} has no key {kid}; mediatord keys list shows those that it has")
        left = {
            "root": _root_members(keys.root),
            **document,
            "keys": [one for one in document["keys"] if one["kid"] not in gone.kids],
        }
        if not really:
            rest = _read(left, path)
            check(rest)
            return gone, rest
        return gone, replace(left, check)


_Replace = Callable[[dict[str, Any], Callable[[KeySet], object]], KeySet]


def _load_to_change(path: Path, passphrase: Passphrase) -> tuple[dict[str, Any], KeySet, _Replace]:
    """What is in the file, and how to write another in its place: encrypted if it was."""
    content, known = read_private(path), None
    if is_locked(content):
        known = passphrase(path)
        content = unlock(content, known, path)
    document = _object(content, path)

    def replace(changed: dict[str, Any], check: Callable[[KeySet], object]) -> KeySet:
        keys = _read(changed, path)
        check(keys)
        rendered = _rendered(changed)
        replace_private(path, rendered if known is None else lock(rendered, known))
        return keys

    return document, _read(document, path), replace


def _fresh(keys: KeySet) -> list[JWK]:
    """New keys of the curves that are served, with a number of their own."""
    taken = {kid for kid, _ in keys}
    number = 1 + max((int(found[1]) for kid in taken if (found := _NUMBERED.fullmatch(kid))), default=1)
    served = [(name, curve) for name, curve in _FRESH if keys.first(curve) is not None]
    return [{"kid": f"{name}-{number}", **PrivateKey.generate(curve).jwk()} for name, curve in served]


def _object(content: bytes, name: object) -> dict[str, Any]:
    try:
        return jsontext.loads_object(content)
    except ValueError:
        raise _not_a_set(name) from None


def _read(document: dict[str, Any], name: object) -> KeySet:
    try:
        jwks: list[JWK] = document["keys"]
        present = tuple(_read_key(jwk) for jwk in jwks if not _is_prepared(jwk))
        prepared = tuple(_read_key(jwk) for jwk in jwks if _is_prepared(jwk))
        keys = KeySet(present, prepared, _read_root(document["root"]) if "root" in document else None)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise _not_a_set(name) from None
    if keys.first("X25519") is None or keys.first("Ed25519") is None:
        raise PrivateFileError(f"{name} lacks a key: expected an X25519 and an Ed25519 key at least")
    if len({kid for kid, _ in keys}) != len(present) + len(prepared):
        raise PrivateFileError(f"{name} has two keys of one kid: expected each kid once")
    return keys


def _not_a_set(name: object) -> PrivateFileError:
    return PrivateFileError(f"{name} is not a set of private keys: expected a JWK set with kid and d")


def _read_key(jwk: JWK) -> NamedKey:
    kid = jwk["kid"]
    if not isinstance(kid, str) or not _KID.fullmatch(kid):
        raise ValueError("not a kid")
    return kid, PrivateKey.from_jwk(jwk)


def _is_prepared(jwk: JWK) -> bool:
    return jwk.get("prepared") is True


def _without(jwk: JWK, name: str) -> JWK:
    return {member: value for member, value in jwk.items() if member != name}


def _read_root(members: dict[str, str]) -> Root:
    agreement, signing = (PublicKey.from_multibase(members[name]) for name in ("agreement", "signing"))
    if (agreement.curve, signing.curve) != ("X25519", "Ed25519"):
        raise ValueError("not a root")
    return Root(agreement, signing)


def _root_members(root: Root) -> dict[str, str]:
    return {"agreement": root.agreement.multibase(), "signing": root.signing.multibase()}


def _rendered(document: dict[str, Any]) -> bytes:
    """One key a line: a person may have to look at the file."""
    jwks: Collection[JWK] = document["keys"]
    others = [
        b"%b: %b,\n" % (jsontext.dumps(name), jsontext.dumps(document[name])) for name in document if name != "keys"
    ]
    return b"{" + b"".join(others) + b'"keys": [\n' + b",\n".join(map(jsontext.dumps, jwks)) + b"\n]}\n"
