"""Which DIDs the daemon has for its self-test (`GET /ready`)."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from mediatord.config import Config
from mediatord.private_file import PrivateFileError
from mediatord.synthetic import may_be_own

if TYPE_CHECKING:
    from mediatord.readiness import Kin


class SelfTestAccounts:
    """Tells them from DIDs that somebody else has made to look like them. Reads the keys only if there are any."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def has(self, did: str) -> bool:
        """
        Whether it is one of them.

        :raise PrivateFileError: it may be, but the keys cannot be read without asking anybody for a passphrase.
        """
        return may_be_own(did) and self._kin.knows(did)

    def may_have(self, did: str) -> bool:
        """The same, and by its form alone where the keys cannot be read."""
        try:
            return self.has(did)
        except PrivateFileError:
            return True

    @cached_property
    def _kin(self) -> Kin:
        # Imports what the daemon needs to talk to itself.
        from mediatord.identity import Identity
        from mediatord.keyfile import load_keys
        from mediatord.keylock import passphrase_from
        from mediatord.readiness import Kin

        given = self._config.identity
        keys = load_keys(given.keys, passphrase_from(given.passphrase_file))
        return Kin(Identity(keys, self._config.public_url, given.former_dids).secret)
