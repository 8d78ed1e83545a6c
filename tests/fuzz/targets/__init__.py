"""
What is fuzzed. A target runs one input through a part of mediatord and raises for whatever must not happen; the first
byte of an input says in which way. Inputs name what differs from run to run by words such as `@MEDIATOR@`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Protocol


class Target(Protocol):
    """
    One part.

    :ivar words: what is worth trying anywhere in an input.
    :ivar longest: bytes that libFuzzer gives to an input.
    :ivar most_calls: functions that an input may have called, and how many more for each of its bytes.
    :ivar most_memory: bytes, likewise.
    """

    words: Sequence[bytes]
    longest: int
    most_calls: tuple[int, int]
    most_memory: tuple[int, int]

    def seeds(self) -> Iterable[bytes]:
        """What the others are made of; each leads further in than chance would."""

    def run(self, data: bytes) -> None:
        """
        Try one input.

        :raise Exception: whichever, if something is wrong.
        """

    def close(self) -> None:
        """There will be no more inputs."""


NAMES = (
    "envelope",
    "http",
    "websocket",
    "did",
    "canonical",
    "decentrl",
    "config",
    "usual",
    "hint",
    "features",
)


def target(name: str) -> Target:
    """
    The target of a name.

    :raise KeyError: there is none.
    """
    if name not in NAMES:
        raise KeyError(name)
    made: Callable[[], Target] = import_module(f"{__name__}.{name}").make
    return made()


def filled_in(data: bytes, words: Mapping[bytes, str]) -> bytes:
    """An input with what its words stand for."""
    if b"@" in data:
        for word, meaning in words.items():
            data = data.replace(word, meaning.encode())
    return data
