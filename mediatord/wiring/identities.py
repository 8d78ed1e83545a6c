"""Who the mediator of a configuration is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from twisted.logger import Logger

from mediatord.config import Config
from mediatord.identity import Identity, IdentityError, shown
from mediatord.keyfile import KeySet, load_keys, read_keys
from mediatord.keylock import passphrase_from
from mediatord.keyset import NamedKey
from mediatord.private_file import PrivateFileError
from mediatord.protocol.didcomm import agreement
from mediatord.protocol.didcomm.keys import PrivateKey
from mediatord.service import StartupError

_log = Logger()


class PresentIdentity:
    """
    The identity that counts, which is another one once keys have been rotated.

    :ivar now: the whole of it.
    """

    def __init__(self, identity: Identity) -> None:
        self.now = identity
        self._forgetting: list[Callable[[], None]] = [agreement.forget]

    def on_change(self, forget: Callable[[], None]) -> None:
        """Have what was made of the keys forgotten when they are others."""
        self._forgetting.append(forget)

    def become(self, identity: Identity) -> None:
        """Be another; no secret that was agreed with keys outlives them."""
        self.now = identity
        for forget in self._forgetting:
            forget()

    @property
    def did(self) -> str:
        """The did:peer:2 of the current keys."""
        return self.now.did

    @property
    def web_did(self) -> str:
        """The did:web."""
        return self.now.web_did

    @property
    def web_document(self) -> dict[str, Any]:
        """Its document."""
        return self.now.web_document

    def owns(self, did: str) -> bool:
        """As of :class:`Identity`."""
        return self.now.owns(did)

    def routing_did(self, addressed: str) -> str:
        """As of :class:`Identity`."""
        return self.now.routing_did(addressed)

    def keys_for(self, kid: str) -> tuple[PrivateKey, ...]:
        """As of :class:`Identity`."""
        return self.now.keys_for(kid)

    def signing_key_for(self, kid: str) -> NamedKey | None:
        """As of :class:`Identity`."""
        return self.now.signing_key_for(kid)


def load_identity(config: Config) -> Identity:
    """
    Our keys and DIDs.

    :raise StartupError: the key file or a former DID cannot be used.
    """
    return _identity(
        config, lambda: load_keys(config.identity.keys, passphrase_from(config.identity.passphrase_file))
    )


def told_identity(config: Config, keys: str) -> Identity:
    """
    The same with keys that somebody has read already.

    :param keys: the content of a key file.
    :raise StartupError: they or a former DID cannot be used.
    """
    return _identity(config, lambda: read_keys(keys.encode("utf-8"), config.identity.keys))


def stages(before: Identity, after: Identity) -> list[KeySet]:
    """
    The keys by which several processes get from one identity to another, each stage after all have reached the one
    before: first everybody accepts what comes, and only then anybody tells it.
    """
    known = {kid: key for kid, key in before.keys}  # noqa: C416  a KeySet is no mapping, though dict() takes it for one
    coming = tuple((kid, key) for kid, key in after.keys if known.get(kid) != key)
    if not coming or any(kid in known for kid, _ in coming):
        return [after.keys]
    return [replace(before.keys, prepared=(*before.keys.prepared, *coming)), after.keys]


def tell_change(before: Identity, after: Identity) -> None:
    """Tell the operator what has changed for wallets."""
    if after.did != before.did:
        _log.info(
            "the DID is {did} now; former ones that are accepted as well: {count}",
            did=shown(after.did),
            count=len(after.former_peer_dids) + len(after.former_dids),
        )
    for did in after.prepared_dids:
        if not before.owns(did):
            _log.info("the DID {did} is accepted and not told to anybody yet", did=shown(did))
    gone = after.lacks(before)
    if gone:
        _log.warn("no longer accepted: {dids}", dids=", ".join(map(shown, gone)))


def _identity(config: Config, keys: Callable[[], KeySet]) -> Identity:
    try:
        return Identity(keys(), config.public_url, config.identity.former_dids, raw_keys=config.decentrl.raw_keys)
    except (PrivateFileError, IdentityError) as error:
        raise StartupError(str(error)) from None
