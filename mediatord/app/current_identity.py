"""The identity in use: loading it, and changing it while the daemon runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from twisted.logger import Logger

from mediatord.config.settings import Config
from mediatord.errors import StartupError
from mediatord.identity.encrypted_file import make_passphrase_source
from mediatord.identity.key_file import KeySet, load_keys, parse_keys
from mediatord.identity.mediator_identity import IdentityError, MediatorIdentity, abbreviate_did
from mediatord.identity.v1_identity import V1Identity
from mediatord.protocol.didcomm import jwe
from mediatord.runtime.secret_files import SecretFileError

_log = Logger()


class CurrentIdentity:
    """
    The identity in use, which changes when keys are rotated.

    :ivar now: that identity.
    :ivar v1: its keys of DIDComm v1.
    :ivar own_dids: as of :class:`MediatorIdentity`, like `decentrl_dids` and `agreement_keys`; always the same
        object, changed in place.
    """

    def __init__(self, identity: MediatorIdentity) -> None:
        self.now = identity
        self.v1 = V1Identity(identity.root_secret)
        self.own_dids = set(identity.own_dids)
        self.decentrl_dids = set(identity.decentrl_dids)
        self.agreement_keys = dict(identity.agreement_keys)

    def switch_to(self, identity: MediatorIdentity) -> None:
        """Use another identity; secrets that were agreed with the former keys are cleared."""
        self.now = identity
        self.v1 = V1Identity(identity.root_secret)
        self.own_dids.clear()
        self.own_dids.update(identity.own_dids)
        self.decentrl_dids.clear()
        self.decentrl_dids.update(identity.decentrl_dids)
        self.agreement_keys.clear()
        self.agreement_keys.update(identity.agreement_keys)
        jwe.clear_key_caches()


def load_identity(config: Config) -> MediatorIdentity:
    """
    Load the keys and DIDs of the mediator.

    :raise StartupError: the key file or a former DID cannot be used.
    """
    return _build_identity(
        config, lambda: load_keys(config.identity.keys, make_passphrase_source(config.identity.passphrase_file))
    )


def parse_identity(config: Config, keys: str) -> MediatorIdentity:
    """
    The identity with given keys instead of those in the configured file.

    :param keys: content of a key file.
    :raise StartupError: they or a former DID cannot be used.
    """
    return _build_identity(config, lambda: parse_keys(keys.encode("utf-8"), config.identity.keys))


def plan_key_rollout(before: MediatorIdentity, after: MediatorIdentity) -> list[KeySet]:
    """
    The stages in which several processes change keys: each begins when all processes have reached the one before.

    So every process accepts the new keys before any process publishes them.
    """
    known = {kid: key for kid, key in before.keys}  # noqa: C416  a KeySet is no mapping, though dict() takes it for one
    added = tuple((kid, key) for kid, key in after.keys if known.get(kid) != key)
    if not added or any(kid in known for kid, _ in added):
        return [after.keys]
    return [replace(before.keys, prepared=(*before.keys.prepared, *added)), after.keys]


def log_identity_change(before: MediatorIdentity, after: MediatorIdentity) -> None:
    """Log what has changed for wallets."""
    if after.did != before.did:
        _log.info(
            "current DID: {did}; {count} former DIDs still accepted",
            did=abbreviate_did(after.did),
            count=len(after.former_peer_dids) + len(after.former_dids),
        )
    for did in after.prepared_dids:
        if not before.owns(did):
            _log.info("prepared DID {did}: accepted, but not yet published", did=abbreviate_did(did))
    gone = after.find_missing_dids(before)
    if gone:
        _log.warn("DIDs no longer accepted: {dids}", dids=", ".join(map(abbreviate_did, gone)))


def _build_identity(config: Config, keys: Callable[[], KeySet]) -> MediatorIdentity:
    try:
        return MediatorIdentity(
            keys(), config.public_url, config.identity.former_dids, raw_keys=config.decentrl.raw_keys
        )
    except (SecretFileError, IdentityError) as error:
        raise StartupError(str(error)) from None
