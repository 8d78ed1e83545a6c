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

_LONGEST_PLAIN = 80
_HEAD = 24
_CACHED = 8192


@dataclass(frozen=True, slots=True)
class TagKey:
    """
    :param epoch: which key this is; pseudonyms of different epochs cannot be compared.
    :param since: the day (UTC) that it began; None if nobody wrote that down.
    """

    epoch: int
    secret: bytes = field(repr=False)
    since: date | None = field(default=None, compare=False)


class Tags:
    """
    Makes tags. Equal input gives equal output for as long as the key is the same.

    :ivar did: callable, the tag of a DID.
    :ivar message: callable, the tag of a message id.
    :ivar peer: callable, the tag of the network of an IP address; None for what is no address, a UNIX socket say.
    :ivar key: that tags are made with.
    :ivar epoch: of the key.
    """

    def __init__(self, mode: Literal["plain", "keyed"], key: TagKey) -> None:
        self._mode = mode
        self.use(key)

    def use(self, key: TagKey) -> None:
        """Make tags with this key from now on."""
        mode = self._mode
        self.key = key
        self.epoch = key.epoch
        self.did: Callable[[str], str] = _cached(_shortened if mode == "plain" else self._keyed(b"did"))
        self.message: Callable[[str], str] = _shortened if mode == "plain" else self._keyed(b"msg")
        self.peer: Callable[[str], str | None] = lru_cache(_CACHED)(self._peer)

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


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST_PLAIN:
        return text
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"{text[:_HEAD]}~{digest}"


def _cached(tag: Callable[[str], str]) -> Callable[[str], str]:
    return lru_cache(_CACHED)(tag)
