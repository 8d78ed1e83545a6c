"""
What stands for a DID, a message id or an address in logs and metrics (`log.dids`).

`plain` shortens what is long; `keyed` gives pseudonyms that only the holder of the key can make again. Addresses are
always pseudonyms, of their network and not of themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from functools import lru_cache
from hashlib import blake2b
from ipaddress import IPv4Address, ip_address, ip_network
from typing import Literal

_MAX_PLAIN_LENGTH = 80
_PLAIN_PREFIX_LENGTH = 24
_CACHE_SIZE = 8192


@dataclass(frozen=True, slots=True)
class PseudonymKey:
    """
    :param epoch: which key this is; pseudonyms of different epochs cannot be compared.
    :param since: the day (UTC) that it began; None if nobody wrote that down.
    """

    epoch: int
    secret: bytes = field(repr=False)
    since: date | None = field(default=None, compare=False)


class Pseudonymizer:
    """
    Makes tags. Equal input gives equal output for as long as the key is the same.

    :ivar did: callable, the tag of a DID.
    :ivar message: callable, the tag of a message id.
    :ivar peer: callable, the tag of the network of an IP address; None for what is no address, a UNIX socket say.
    :ivar key: that tags are made with.
    :ivar epoch: of the key.
    """

    def __init__(self, mode: Literal["plain", "keyed"], key: PseudonymKey) -> None:
        self._mode = mode
        self.set_key(key)

    def set_key(self, key: PseudonymKey) -> None:
        """Make tags with this key from now on."""
        mode = self._mode
        self.key = key
        self.epoch = key.epoch
        self.did: Callable[[str], str] = _with_cache(_shorten if mode == "plain" else self._keyed(b"did"))
        self.message: Callable[[str], str] = _shorten if mode == "plain" else self._keyed(b"msg")
        self.peer: Callable[[str], str | None] = lru_cache(_CACHE_SIZE)(self._peer)

    def _keyed(self, purpose: bytes) -> Callable[[str], str]:
        key = self.key

        def pseudonym(text: str) -> str:
            return blake2b(
                text.encode("utf-8", "surrogatepass"), digest_size=16, key=key.secret, person=purpose
            ).hexdigest()

        return pseudonym

    def _peer(self, address: str) -> str | None:
        try:
            parsed = ip_address(address.partition("/")[0].partition("%")[0])
        except ValueError:
            return None
        mapped = parsed if isinstance(parsed, IPv4Address) else parsed.ipv4_mapped
        network = ip_network((mapped, 24) if mapped else (parsed, 48), strict=False)
        return self._keyed(b"peer")(str(network))


def _shorten(text: str) -> str:
    if len(text) <= _MAX_PLAIN_LENGTH:
        return text
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"{text[:_PLAIN_PREFIX_LENGTH]}~{digest}"


def _with_cache(tag: Callable[[str], str]) -> Callable[[str], str]:
    return lru_cache(_CACHE_SIZE)(tag)
