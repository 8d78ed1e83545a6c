"""The secret that the nodes of a cluster share, and what is made from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from mediatord.private_file import PrivateFileError, read_private

LEAST = 32
_KEY_SIZE = 32
_PREFIX = b"mediatord cluster: "
_PURPOSES = (b"seal", b"requests", b"responses", b"allowances")


@dataclass(frozen=True, slots=True)
class ClusterKeys:
    """
    Keys that say nothing about each other, nor about the secret.

    :param seal: is shown to other nodes, who compare it with theirs; makes nothing.
    :param requests: authenticates requests.
    :param responses: authenticates responses.
    :param allowances: hides who is limited from who can read the store.
    """

    seal: bytes = field(repr=False)
    requests: bytes = field(repr=False)
    responses: bytes = field(repr=False)
    allowances: bytes = field(repr=False)


def read_secret(path: Path) -> ClusterKeys:
    """
    The keys made from the secret in a file; white space around it does not count.

    :raise PrivateFileError: it cannot be read, is open to others, or too short to be a secret.
    """
    secret = read_private(path).strip()
    if len(secret) < LEAST:
        raise PrivateFileError(f"{path} holds less than {LEAST} bytes; type: openssl rand -hex 32 > {path}")
    return derive(secret)


def derive(secret: bytes) -> ClusterKeys:
    """The keys made from a secret, of at least :data:`LEAST` bytes."""
    return ClusterKeys(*(_derived(secret, purpose) for purpose in _PURPOSES))


def _derived(secret: bytes, purpose: bytes) -> bytes:
    return HKDF(SHA256(), _KEY_SIZE, salt=None, info=_PREFIX + purpose).derive(secret)
