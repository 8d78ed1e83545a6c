"""DIDs of a wallet and their private keys (reference 8)."""

from __future__ import annotations

from dataclasses import dataclass

from mediatord.protocol.didcomm.did_document import DIDDocument
from mediatord.protocol.didcomm.did_methods import make_did_peer_2, resolve_local
from mediatord.protocol.didcomm.keys import PrivateKey


@dataclass(frozen=True, slots=True)
class WalletKey:
    """
    A private key.

    :param kid: absolute DID URL, as the current specification spells it.
    """

    kid: str
    private: PrivateKey


@dataclass(frozen=True, slots=True)
class WalletIdentity:
    """
    A DID and its private keys.

    :param did: with did:peer:4, the long form.
    :param agreement: for encryption.
    :param signing: for `from_prior`.
    """

    did: str
    agreement: WalletKey
    signing: WalletKey

    @classmethod
    def generate(cls, *, endpoint: str | None = None) -> WalletIdentity:
        """
        A new did:peer:2 with new keys.

        :param endpoint: the DID of its mediator, or a URL.
        """
        agreement, signing = PrivateKey.generate("X25519"), PrivateKey.generate("Ed25519")
        return cls.from_keys(agreement, signing, endpoint)

    @classmethod
    def from_keys(cls, agreement: PrivateKey, signing: PrivateKey, endpoint: str | None = None) -> WalletIdentity:
        """The did:peer:2 of given keys."""
        service = {"t": "dm", "s": {"uri": endpoint, "a": ["didcomm/v2"]}}
        keys = [("E", agreement.public), ("V", signing.public)]
        did = make_did_peer_2(keys, [] if endpoint is None else [service])
        return cls(did, WalletKey(f"{did}#key-1", agreement), WalletKey(f"{did}#key-2", signing))

    @property
    def document(self) -> DIDDocument:
        """The DID document."""
        return resolve_local(self.did)

    def find_agreement_key(self, kid: str) -> PrivateKey | None:
        """The private key of a `kid`, in any of the spellings seen in practice (reference 8.6)."""
        if kid == self.agreement.kid:
            return self.agreement.private
        method = self.document.key_agreement_key(kid)
        if method is None or method.key != self.agreement.private.public:
            return None
        return self.agreement.private
