"""What a worker is told when it begins."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field

from twisted.internet.endpoints import quoteStringArgument


@dataclass(frozen=True, slots=True)
class Inherited:
    """
    A socket that listens already, one of those a process was born with.

    :param family: an address family of :mod:`socket`.
    """

    descriptor: int
    family: socket.AddressFamily


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """
    What a worker has instead of `cluster` settings.

    :param path: of its node-to-node socket.
    :param secret: the same for all workers of a daemon, and at every start.
    :param seed: that of the mediator when the daemon was started, whichever keys it has come to since.
    :param sockets: one for each of the configuration's `listen`, in that order, and one for `admin.listen`.
    :param keys: the content of a key file: what all workers of a daemon have.
    """

    path: str
    secret: bytes = field(repr=False)
    seed: bytes = field(repr=False)
    sockets: tuple[Inherited, ...]
    keys: bytes = field(repr=False)

    @property
    def address(self) -> str:
        """Of its node-to-node listener: an endpoint string for server and client alike."""
        return f"unix:{quoteStringArgument(self.path)}"


@dataclass(frozen=True, slots=True)
class Brief:
    """
    Everything a worker needs to know; for its eyes only.

    :param settings: its configuration as JSON.
    """

    place: WorkerPlace
    settings: str = field(repr=False)

    def written(self) -> bytes:
        """For :meth:`read`."""
        place = self.place
        sockets = [(one.descriptor, int(one.family)) for one in place.sockets]
        told = [place.path, place.secret.hex(), place.seed.hex(), sockets, place.keys.decode("utf-8"), self.settings]
        return json.dumps(told).encode("ascii")

    @classmethod
    def read(cls, raw: bytes) -> Brief:
        """
        What :meth:`written` wrote.

        :raise ValueError: not all of it, as when the supervisor was killed just then.
        """
        path, secret, seed, sockets, keys, settings = json.loads(raw)
        inherited = tuple(Inherited(descriptor, socket.AddressFamily(family)) for descriptor, family in sockets)
        place = WorkerPlace(path, bytes.fromhex(secret), bytes.fromhex(seed), inherited, keys.encode("utf-8"))
        return cls(place, settings)
