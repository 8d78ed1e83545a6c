"""
The mediator's private keys: which are current, which are former, and which are prepared.

The mediator's private keys: a JWK set in a file of mode 0600 (reference section 9), which may be encrypted
(:mod:`mediatord.identity.encrypted_file`). Whatever changes an encrypted file leaves it encrypted, by the same passphrase.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mediatord.identity.encrypted_file import (
    PassphraseSource,
    decrypt_content,
    encrypt_content,
    is_encrypted,
    make_passphrase_source,
)
from mediatord.private_file import (
    PrivateFileError,
    create_private_file,
    lock_private_file,
    read_private_file,
    replace_private_file,
)
from mediatord.protocol import encoding
from mediatord.protocol.didcomm.keys import Curve, PrivateKey, PublicKey

NamedKey = tuple[str, PrivateKey]


@dataclass(frozen=True, slots=True)
class KeyGeneration:
    """
    Keys that were made together: of each curve one at most.

    :param keys: pairs of key id and key.
    """

    keys: tuple[NamedKey, ...] = field(repr=False)

    @property
    def kids(self) -> tuple[str, ...]:
        """The ids of its keys."""
        return tuple(kid for kid, _ in self.keys)

    def key(self, curve: Curve) -> PrivateKey | None:
        """Its key of a curve."""
        return next((key for _, key in self.keys if key.curve == curve), None)


@dataclass(frozen=True, slots=True)
class RootKeys:
    """
    The public halves of the oldest keys, by which a mediator is known as the same even after they are retired.

    :param agreement: on X25519.
    :param signing: on Ed25519.
    """

    agreement: PublicKey
    signing: PublicKey


@dataclass(frozen=True, slots=True)
class KeySet:
    """
    Keys in the order of the file; of each curve the first is the current one, the others open what old DIDs bring.

    :param keys: pairs of key id and key.
    :param prepared: those that will be the current ones: they open, and nobody is told of them yet.
    :param retired_root: of keys that are not here any more; None as long as none was retired.
    """

    keys: tuple[NamedKey, ...] = field(repr=False)
    prepared: tuple[NamedKey, ...] = field(repr=False, default=())
    retired_root: RootKeys | None = None

    def current_key(self, curve: Curve) -> NamedKey | None:
        """Id and key of the current key of a curve."""
        return next(((kid, key) for kid, key in self.keys if key.curve == curve), None)

    def __iter__(self) -> Iterator[NamedKey]:
        """All of them, the prepared ones last."""
        return iter((*self.keys, *self.prepared))

    @property
    def generations(self) -> tuple[KeyGeneration, ...]:
        """The current one and the former ones, latest first: the n-th key of each curve belongs to the n-th."""
        return _group_generations(self.keys)

    @property
    def prepared_generations(self) -> tuple[KeyGeneration, ...]:
        """Those to come; one at most, unless somebody has edited the file."""
        return _group_generations(self.prepared)

    @property
    def root(self) -> RootKeys:
        """The same for all key sets that one has become by rotating and retiring."""
        if self.retired_root is not None:
            return self.retired_root
        agreement, signing = self.oldest
        return RootKeys(agreement.public, signing.public)

    @property
    def oldest(self) -> tuple[PrivateKey, PrivateKey]:
        """The X25519 and the Ed25519 key of the earliest generation that has both."""
        pairs = ((one.key("X25519"), one.key("Ed25519")) for one in reversed(self.generations))
        return next((agreement, signing) for agreement, signing in pairs if agreement and signing)


def _group_generations(keys: Iterable[NamedKey]) -> tuple[KeyGeneration, ...]:
    found: list[list[NamedKey]] = []
    count: dict[Curve, int] = {}
    for kid, key in keys:
        number = count[key.curve] = count.get(key.curve, 0) + 1
        if number > len(found):
            found.append([])
        found[number - 1].append((kid, key))
    return tuple(KeyGeneration(tuple(one)) for one in found)


_NO_PASSPHRASE = make_passphrase_source(None)

# The ids are fragments of our did:web; the first two are those that Decentrl prescribes.
_SERVED_CURVES: tuple[tuple[str, Curve], ...] = (
    ("prekey", "X25519"),
    ("signing", "Ed25519"),
    ("p256", "P-256"),
    ("p384", "P-384"),
    ("p521", "P-521"),
)
_KID = re.compile(r"[A-Za-z0-9._~-]{1,100}")
_NUMBERED_KID = re.compile(rf"(?:{'|'.join(name for name, _ in _SERVED_CURVES)})-([1-9][0-9]{{0,8}})")

JWK = dict[str, Any]


def generate_keys() -> KeySet:
    """A fresh key of every curve that is served."""
    return KeySet(tuple((kid, PrivateKey.generate(curve)) for kid, curve in _SERVED_CURVES))


def create_keys(path: Path) -> KeySet:
    """
    Make the file with fresh keys.

    :raise PrivateFileError: it is there already or cannot be written.
    """
    keys = generate_keys()
    create_private_file(path, serialize_keys(keys))
    return keys


def load_keys(path: Path, passphrase: PassphraseSource = _NO_PASSPHRASE) -> KeySet:
    """
    Read the file.

    :param passphrase: gives that of a file, if it is encrypted.
    :raise PrivateFileError: it is missing, open to others, does not open, or is no set of private keys with an X25519
        and an Ed25519 key in it.
    """
    return _load_for_update(path, passphrase)[1]


def encrypt_keys(path: Path, passphrase: bytes) -> None:
    """
    Encrypt the file, after looking whether it can be opened again.

    :raise PrivateFileError: it cannot be used or written, or is encrypted already.
    """
    path = path.resolve()
    with lock_private_file(path):
        content = read_private_file(path)
        if is_encrypted(content):
            raise PrivateFileError(f"{path} is encrypted already; decrypt it first")
        parse_keys(content, path)
        replace_private_file(path, encrypt_content(content, passphrase))


def decrypt_keys(path: Path, passphrase: PassphraseSource) -> None:
    """
    Have the file in the clear again.

    :raise PrivateFileError: it cannot be used or written, does not open, or is not encrypted.
    """
    path = path.resolve()
    with lock_private_file(path):
        content = read_private_file(path)
        if not is_encrypted(content):
            raise PrivateFileError(f"{path} is not encrypted")
        content = decrypt_content(content, passphrase(path), path)
        parse_keys(content, path)
        replace_private_file(path, content)


def serialize_keys(keys: KeySet) -> bytes:
    """The content of a file with these keys, for :func:`parse_keys`: a secret."""
    document: dict[str, Any] = {} if keys.retired_root is None else {"root": _serialize_root(keys.retired_root)}
    prepared = [{"kid": kid, "prepared": True, **key.jwk()} for kid, key in keys.prepared]
    return _render_document({**document, "keys": [{"kid": kid, **key.jwk()} for kid, key in keys.keys] + prepared})


def parse_keys(content: bytes, name: object) -> KeySet:
    """
    The keys in the content of a file.

    :param name: of the file, for the text of the error.
    :raise PrivateFileError: as :func:`load_keys`.
    """
    return _parse_key_set(_parse_object(content, name), name)


def rotate_keys(
    path: Path,
    check: Callable[[KeySet], object],
    *,
    prepare: bool = False,
    passphrase: PassphraseSource = _NO_PASSPHRASE,
) -> KeySet:
    """
    Make the prepared keys the current ones, or fresh ones of the same curves where none are prepared.

    :param check: raises to leave the file as it is.
    :param prepare: only prepare fresh ones.
    :param passphrase: as of :func:`load_keys`.
    :raise PrivateFileError: the file cannot be used or written; or keys are prepared already.
    """
    path = path.resolve()
    with lock_private_file(path):
        document, keys, replace = _load_for_update(path, passphrase)
        if prepare and keys.prepared:
            raise PrivateFileError(f"{path} has prepared keys already; rotate makes them the current ones")
        jwks: list[JWK] = document["keys"]
        coming = [one for one in jwks if _is_prepared(one)]
        others = [one for one in jwks if not _is_prepared(one)]
        if prepare:
            # After the current ones: an earlier release would take them for former keys.
            others += [{**one, "prepared": True} for one in _generate_next_keys(keys)]
        else:
            fresh = [_omit_member(one, "prepared") for one in coming] if coming else _generate_next_keys(keys)
            others = [*fresh, *others]
        return replace({**document, "keys": others}, check)


def retire_keys(
    path: Path,
    kid: str,
    check: Callable[[KeySet], object],
    *,
    really: bool = True,
    passphrase: PassphraseSource = _NO_PASSPHRASE,
) -> tuple[KeyGeneration, KeySet]:
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
    with lock_private_file(path):
        document, keys, replace = _load_for_update(path, passphrase)
        current, *former = keys.generations
        gone = next((one for one in (*former, *keys.prepared_generations) if kid in one.kids), None)
        if gone is None:
            if kid in current.kids:
                raise PrivateFileError(f"{kid} is a current key, which cannot be retired; rotate first")
            raise PrivateFileError(f"{path} has no key {kid}; mediatord keys list shows those that it has")
        left = {
            "root": _serialize_root(keys.root),
            **document,
            "keys": [one for one in document["keys"] if one["kid"] not in gone.kids],
        }
        if not really:
            rest = _parse_key_set(left, path)
            check(rest)
            return gone, rest
        return gone, replace(left, check)


_ReplaceFunction = Callable[[dict[str, Any], Callable[[KeySet], object]], KeySet]


def _load_for_update(path: Path, passphrase: PassphraseSource) -> tuple[dict[str, Any], KeySet, _ReplaceFunction]:
    """What is in the file, and how to write another in its place: encrypted if it was."""
    content, known = read_private_file(path), None
    if is_encrypted(content):
        known = passphrase(path)
        content = decrypt_content(content, known, path)
    document = _parse_object(content, path)

    def replace(changed: dict[str, Any], check: Callable[[KeySet], object]) -> KeySet:
        keys = _parse_key_set(changed, path)
        check(keys)
        rendered = _render_document(changed)
        replace_private_file(path, rendered if known is None else encrypt_content(rendered, known))
        return keys

    return document, _parse_key_set(document, path), replace


def _generate_next_keys(keys: KeySet) -> list[JWK]:
    """New keys of the curves that are served, with a number of their own."""
    taken = {kid for kid, _ in keys}
    number = 1 + max((int(found[1]) for kid in taken if (found := _NUMBERED_KID.fullmatch(kid))), default=1)
    served = [(name, curve) for name, curve in _SERVED_CURVES if keys.current_key(curve) is not None]
    return [{"kid": f"{name}-{number}", **PrivateKey.generate(curve).jwk()} for name, curve in served]


def _parse_object(content: bytes, name: object) -> dict[str, Any]:
    try:
        return encoding.loads_object(content)
    except ValueError:
        raise _make_key_set_error(name) from None


def _parse_key_set(document: dict[str, Any], name: object) -> KeySet:
    try:
        jwks: list[JWK] = document["keys"]
        present = tuple(_parse_key(jwk) for jwk in jwks if not _is_prepared(jwk))
        prepared = tuple(_parse_key(jwk) for jwk in jwks if _is_prepared(jwk))
        keys = KeySet(present, prepared, _parse_root(document["root"]) if "root" in document else None)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise _make_key_set_error(name) from None
    if keys.current_key("X25519") is None or keys.current_key("Ed25519") is None:
        raise PrivateFileError(f"{name} lacks a key: expected an X25519 and an Ed25519 key at least")
    if len({kid for kid, _ in keys}) != len(present) + len(prepared):
        raise PrivateFileError(f"{name} has two keys of one kid: expected each kid once")
    return keys


def _make_key_set_error(name: object) -> PrivateFileError:
    return PrivateFileError(f"{name} is not a set of private keys: expected a JWK set with kid and d")


def _parse_key(jwk: JWK) -> NamedKey:
    kid = jwk["kid"]
    if not isinstance(kid, str) or not _KID.fullmatch(kid):
        raise ValueError("not a kid")
    return kid, PrivateKey.from_jwk(jwk)


def _is_prepared(jwk: JWK) -> bool:
    return jwk.get("prepared") is True


def _omit_member(jwk: JWK, name: str) -> JWK:
    return {member: value for member, value in jwk.items() if member != name}


def _parse_root(members: dict[str, str]) -> RootKeys:
    agreement, signing = (PublicKey.from_multibase(members[name]) for name in ("agreement", "signing"))
    if (agreement.curve, signing.curve) != ("X25519", "Ed25519"):
        raise ValueError("not a root")
    return RootKeys(agreement, signing)


def _serialize_root(root: RootKeys) -> dict[str, str]:
    return {"agreement": root.agreement.multibase(), "signing": root.signing.multibase()}


def _render_document(document: dict[str, Any]) -> bytes:
    """One key a line: a person may have to look at the file."""
    jwks: Collection[JWK] = document["keys"]
    others = [
        b"%b: %b,\n" % (encoding.dumps(name), encoding.dumps(document[name])) for name in document if name != "keys"
    ]
    return b"{" + b"".join(others) + b'"keys": [\n' + b",\n".join(map(encoding.dumps, jwks)) + b"\n]}\n"
