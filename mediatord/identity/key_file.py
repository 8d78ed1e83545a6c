"""
The mediator's private keys: a JWK set in a file of mode 0600, optionally encrypted (reference section 9).

Keys are current, former or prepared. Updates keep an encrypted file encrypted with the same passphrase
(:mod:`mediatord.identity.encrypted_file`).
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mediatord.identity.encrypted_file import (
    PassphraseSource,
    decrypt_content,
    encrypt_content,
    is_encrypted,
    make_passphrase_source,
)
from mediatord.protocol import encoding
from mediatord.protocol.didcomm.keys import Curve, PrivateKey, PublicKey
from mediatord.runtime.secret_files import (
    SecretFileError,
    create_secret_file,
    lock_secret_file,
    read_secret_file,
    replace_secret_file,
)

_ROOT_SECRET_SIZE = 32

NamedKey = tuple[str, PrivateKey]


@dataclass(frozen=True, slots=True)
class KeyGeneration:
    """
    Keys that were generated together, at most one per curve.

    :param keys: pairs of key id and key.
    """

    keys: tuple[NamedKey, ...] = field(repr=False)

    @property
    def kids(self) -> tuple[str, ...]:
        """Key ids."""
        return tuple(kid for kid, _ in self.keys)

    def key(self, curve: Curve) -> PrivateKey | None:
        """Key of a curve."""
        return next((key for _, key in self.keys if key.curve == curve), None)


@dataclass(frozen=True, slots=True)
class RootKeys:
    """
    What remains of the oldest generation after its keys are retired.

    :param agreement: public X25519 key, which with the other one identifies the mediator.
    :param signing: public Ed25519 key.
    :param secret: root secret; None if it was retired, too, or follows from the keys.
    """

    agreement: PublicKey
    signing: PublicKey
    secret: bytes | None = field(repr=False, default=None)


@dataclass(frozen=True, slots=True)
class KeySet:
    """
    Keys in file order; the first of each curve is current, the others decrypt messages to former DIDs.

    :param keys: pairs of key id and key.
    :param prepared: next keys: they decrypt, but are not published yet.
    :param retired_root: root keys that are no longer in the file; None as long as no key was retired.
    """

    keys: tuple[NamedKey, ...] = field(repr=False)
    prepared: tuple[NamedKey, ...] = field(repr=False, default=())
    retired_root: RootKeys | None = None

    def current_key(self, curve: Curve) -> NamedKey | None:
        """Id and key of the current key of a curve."""
        return next(((kid, key) for kid, key in self.keys if key.curve == curve), None)

    def __iter__(self) -> Iterator[NamedKey]:
        """All keys, prepared ones last."""
        return iter((*self.keys, *self.prepared))

    @property
    def generations(self) -> tuple[KeyGeneration, ...]:
        """Current and former generations, latest first: the n-th key of each curve belongs to the n-th."""
        return _group_generations(self.keys)

    @property
    def prepared_generations(self) -> tuple[KeyGeneration, ...]:
        """Prepared generations; at most one unless the file was edited."""
        return _group_generations(self.prepared)

    @property
    def root(self) -> RootKeys:
        """Root keys, which stay the same across rotation and retirement."""
        if self.retired_root is not None:
            return self.retired_root
        agreement, signing = self.oldest
        return RootKeys(agreement.public, signing.public)

    @property
    def root_secret(self) -> bytes:
        """
        32 secret bytes that stay the same across rotation and retirement, until :func:`retire_root_secret`. The key
        that they follow from cannot be found from them.
        """
        if self.retired_root is not None and self.retired_root.secret is not None:
            return self.retired_root.secret
        return hmac.digest(self.oldest[1].secret, b"mediatord", "sha256")

    @property
    def oldest(self) -> tuple[PrivateKey, PrivateKey]:
        """X25519 and Ed25519 key of the oldest generation that has both."""
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

# Key ids are fragments of the did:web; Decentrl prescribes the first two.
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
    """Generate a key for every supported curve."""
    return KeySet(tuple((kid, PrivateKey.generate(curve)) for kid, curve in _SERVED_CURVES))


def create_keys(path: Path) -> KeySet:
    """
    Create the file with new keys.

    :raise SecretFileError: it exists or cannot be written.
    """
    keys = generate_keys()
    create_secret_file(path, serialize_keys(keys))
    return keys


def load_keys(path: Path, passphrase: PassphraseSource = _NO_PASSPHRASE) -> KeySet:
    """
    Read the file.

    :param passphrase: source of the passphrase of an encrypted file.
    :raise SecretFileError: missing, accessible to others, not decryptable, or not a private JWK set with an X25519
        and an Ed25519 key.
    """
    return _load_for_update(path, passphrase)[1]


def encrypt_keys(path: Path, passphrase: bytes) -> None:
    """
    Encrypt the file, after verifying its content.

    :raise SecretFileError: it cannot be used or written, or is encrypted already.
    """
    path = path.resolve()
    with lock_secret_file(path):
        content = read_secret_file(path)
        if is_encrypted(content):
            raise SecretFileError(f"{path} is already encrypted; to change the passphrase, decrypt it first")
        parse_keys(content, path)
        replace_secret_file(path, encrypt_content(content, passphrase))


def decrypt_keys(path: Path, passphrase: PassphraseSource) -> None:
    """
    Decrypt the file in place.

    :raise SecretFileError: it cannot be used, written or decrypted, or is not encrypted.
    """
    path = path.resolve()
    with lock_secret_file(path):
        content = read_secret_file(path)
        if not is_encrypted(content):
            raise SecretFileError(f"{path} is not encrypted")
        content = decrypt_content(content, passphrase(path), path)
        parse_keys(content, path)
        replace_secret_file(path, content)


def serialize_keys(keys: KeySet) -> bytes:
    """File content for a key set, as read by :func:`parse_keys`: a secret."""
    document: dict[str, Any] = {} if keys.retired_root is None else {"root": _serialize_root(keys.retired_root)}
    prepared = [{"kid": kid, "prepared": True, **key.jwk()} for kid, key in keys.prepared]
    return _render_document({**document, "keys": [{"kid": kid, **key.jwk()} for kid, key in keys.keys] + prepared})


def parse_keys(content: bytes, name: object) -> KeySet:
    """
    Parse file content.

    :param name: of the file, for error messages.
    :raise SecretFileError: as :func:`load_keys`.
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
    Make the prepared keys current, or new ones of the same curves if none are prepared.

    :param check: raises to leave the file unchanged.
    :param prepare: only prepare new keys.
    :param passphrase: as for :func:`load_keys`.
    :raise SecretFileError: the file cannot be used or written, or keys are prepared already.
    """
    path = path.resolve()
    with lock_secret_file(path):
        document, keys, replace_file = _load_for_update(path, passphrase)
        if prepare and keys.prepared:
            raise SecretFileError(
                f"{path} already has prepared keys; run `mediatord keys rotate` to make them current"
            )
        jwks: list[JWK] = document["keys"]
        coming = [one for one in jwks if _is_prepared(one)]
        others = [one for one in jwks if not _is_prepared(one)]
        if prepare:
            # Placed after the current ones, since earlier releases take them for former keys.
            others += [{**one, "prepared": True} for one in _generate_next_keys(keys)]
        else:
            for one in coming:
                del one["prepared"]
            fresh = coming or _generate_next_keys(keys)
            others = [*fresh, *others]
        return replace_file({**document, "keys": others}, check)


def retire_keys(
    path: Path,
    kid: str,
    check: Callable[[KeySet], object],
    *,
    dry_run: bool = False,
    passphrase: PassphraseSource = _NO_PASSPHRASE,
) -> tuple[KeyGeneration, KeySet]:
    """
    Delete the former or prepared generation that contains a key. The root secret is kept.

    :param kid: id of any key of the generation.
    :param check: raises to leave the file unchanged.
    :param dry_run: only compute the result.
    :param passphrase: as for :func:`load_keys`.
    :return: the deleted generation, and the remaining keys.
    :raise SecretFileError: no such key, a current key, or the file cannot be used or written.
    """
    path = path.resolve()
    with lock_secret_file(path):
        document, keys, replace_file = _load_for_update(path, passphrase)
        current, *former = keys.generations
        gone = next((one for one in (*former, *keys.prepared_generations) if kid in one.kids), None)
        if gone is None:
            if kid in current.kids:
                raise SecretFileError(
                    f"{kid} is a current key, which cannot be retired; run `mediatord keys rotate` first"
                )
            raise SecretFileError(f"{path} has no key {kid}; list its keys with `mediatord keys list`")
        root = replace(keys.root, secret=keys.root_secret)
        left = [one for one in document["keys"] if one["kid"] not in gone.kids]
        changed = {**document, "root": _serialize_root(root), "keys": left}
        return gone, _preview(changed, path, check) if dry_run else replace_file(changed, check)


def retire_root_secret(
    path: Path,
    check: Callable[[KeySet], object],
    *,
    dry_run: bool = False,
    passphrase: PassphraseSource = _NO_PASSPHRASE,
) -> KeySet:
    """
    Delete the root secret of retired keys; from then on that of the oldest keys in the file is used.

    :param check: as for :func:`retire_keys`, and so are the others.
    :raise SecretFileError: the root secret follows from keys that are in the file, or the file cannot be used or
        written.
    """
    path = path.resolve()
    with lock_secret_file(path):
        document, keys, replace_file = _load_for_update(path, passphrase)
        if keys.retired_root is None or keys.retired_root.secret is None:
            raise SecretFileError(f"{path} has no root secret of retired keys; retire the oldest keys first")
        changed = {**document, "root": _serialize_root(replace(keys.retired_root, secret=None))}
        return _preview(changed, path, check) if dry_run else replace_file(changed, check)


def _preview(document: dict[str, Any], path: Path, check: Callable[[KeySet], object]) -> KeySet:
    """The keys that a changed file would have, checked."""
    keys = _parse_key_set(document, path)
    check(keys)
    return keys


_RESTORE_HINT = "restore it from a backup, or create the keys of a new mediator with `mediatord init`"
_ReplaceFunction = Callable[[dict[str, Any], Callable[[KeySet], object]], KeySet]


def _load_for_update(path: Path, passphrase: PassphraseSource) -> tuple[dict[str, Any], KeySet, _ReplaceFunction]:
    """Content of the file, and a function that replaces it, encrypted if it was."""
    try:
        content, known = read_secret_file(path), None
    except SecretFileError as error:
        if not isinstance(error.__context__, FileNotFoundError):
            raise
        raise SecretFileError(f"{error}; {_RESTORE_HINT}") from None
    if is_encrypted(content):
        known = passphrase(path)
        content = decrypt_content(content, known, path)
    document = _parse_object(content, path)

    def replace_file(changed: dict[str, Any], check: Callable[[KeySet], object]) -> KeySet:
        keys = _preview(changed, path, check)
        rendered = _render_document(changed)
        replace_secret_file(path, rendered if known is None else encrypt_content(rendered, known))
        return keys

    return document, _parse_key_set(document, path), replace_file


def _generate_next_keys(keys: KeySet) -> list[JWK]:
    """New keys of the supported curves, numbered consecutively."""
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
        raise SecretFileError(f"{name} lacks a key: expected at least an X25519 and an Ed25519 key")
    if len({kid for kid, _ in keys}) != len(present) + len(prepared):
        raise SecretFileError(f"{name} has two keys with the same kid: expected unique kids")
    return keys


def _make_key_set_error(name: object) -> SecretFileError:
    return SecretFileError(f"{name} is not a private key set: expected a JWK set with kid and d")


def _parse_key(jwk: JWK) -> NamedKey:
    kid = jwk["kid"]
    if not isinstance(kid, str) or not _KID.fullmatch(kid):
        raise ValueError("not a kid")
    return kid, PrivateKey.from_jwk(jwk)


def _is_prepared(jwk: JWK) -> bool:
    return jwk.get("prepared") is True


def _parse_root(members: dict[str, str]) -> RootKeys:
    agreement, signing = (PublicKey.from_multibase(members[name]) for name in ("agreement", "signing"))
    secret = encoding.decode_base64url(members["secret"]) if "secret" in members else None
    if (agreement.curve, signing.curve) != ("X25519", "Ed25519"):
        raise ValueError("not a root")
    if secret is not None and len(secret) != _ROOT_SECRET_SIZE:
        raise ValueError("not a root secret")
    return RootKeys(agreement, signing, secret)


def _serialize_root(root: RootKeys) -> dict[str, str]:
    members = {"agreement": root.agreement.multibase(), "signing": root.signing.multibase()}
    return members if root.secret is None else {**members, "secret": encoding.encode_base64url(root.secret)}


def _render_document(document: dict[str, Any]) -> bytes:
    """One key per line, to be readable for humans."""
    jwks: Collection[JWK] = document["keys"]
    others = [
        b"%b: %b,\n" % (encoding.dumps(name), encoding.dumps(document[name])) for name in document if name != "keys"
    ]
    return b"{" + b"".join(others) + b'"keys": [\n' + b",\n".join(map(encoding.dumps, jwks)) + b"\n]}\n"
