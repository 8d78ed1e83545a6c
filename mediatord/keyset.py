"""The mediator's private keys: which are current, which are former, and which are prepared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from mediatord.protocol.didcomm.keys import Curve, PrivateKey, PublicKey

NamedKey = tuple[str, PrivateKey]


@dataclass(frozen=True, slots=True)
class Generation:
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
class Root:
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
    retired_root: Root | None = None

    def first(self, curve: Curve) -> NamedKey | None:
        """Id and key of the current key of a curve."""
        return next(((kid, key) for kid, key in self.keys if key.curve == curve), None)

    def __iter__(self) -> Iterator[NamedKey]:
        """All of them, the prepared ones last."""
        return iter((*self.keys, *self.prepared))

    @property
    def generations(self) -> tuple[Generation, ...]:
        """The current one and the former ones, latest first: the n-th key of each curve belongs to the n-th."""
        return _generations(self.keys)

    @property
    def prepared_generations(self) -> tuple[Generation, ...]:
        """Those to come; one at most, unless somebody has edited the file."""
        return _generations(self.prepared)

    @property
    def root(self) -> Root:
        """The same for all key sets that one has become by rotating and retiring."""
        if self.retired_root is not None:
            return self.retired_root
        agreement, signing = self.oldest
        return Root(agreement.public, signing.public)

    @property
    def oldest(self) -> tuple[PrivateKey, PrivateKey]:
        """The X25519 and the Ed25519 key of the earliest generation that has both."""
        pairs = ((one.key("X25519"), one.key("Ed25519")) for one in reversed(self.generations))
        return next((agreement, signing) for agreement, signing in pairs if agreement and signing)


def _generations(keys: Iterable[NamedKey]) -> tuple[Generation, ...]:
    found: list[list[NamedKey]] = []
    count: dict[Curve, int] = {}
    for kid, key in keys:
        number = count[key.curve] = count.get(key.curve, 0) + 1
        if number > len(found):
            found.append([])
        found[number - 1].append((kid, key))
    return tuple(Generation(tuple(one)) for one in found)
