"""
Fuzz targets. A target runs one input through a part of mediatord and raises on any failure; the first byte of an
input selects the mode. Values that differ between runs are named by words such as `@MEDIATOR@`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Protocol


class Target(Protocol):
    """
    A fuzz target.

    :ivar words: tokens for mutations.
    :ivar longest: maximum length of inputs for libFuzzer.
    :ivar most_calls: maximum function calls of an input, constant and per byte.
    :ivar most_memory: maximum bytes of memory, likewise.
    """

    words: Sequence[bytes]
    longest: int
    most_calls: tuple[int, int]
    most_memory: tuple[int, int]

    def seeds(self) -> Iterable[bytes]:
        """Initial inputs, which reach further than random ones."""

    def run(self, data: bytes) -> None:
        """
        Run one input.

        :raise Exception: any, on a failure.
        """

    def close(self) -> None:
        """Finish; there are no more inputs."""


NAMES = (
    "envelope",
    "http",
    "websocket",
    "did",
    "canonical",
    "decentrl",
    "config",
    "fast_forward",
    "hint",
    "features",
    "v1_envelope",
    "v1_message",
    "v1_handshake",
)


def target(name: str) -> Target:
    """
    Return the target of this name.

    :raise KeyError: there is none.
    """
    if name not in NAMES:
        raise KeyError(name)
    made: Callable[[], Target] = import_module(f"{__name__}.{name}").make
    return made()


def replace_words(data: bytes, words: Mapping[bytes, str]) -> bytes:
    """Replace the words in an input."""
    if b"@" in data:
        for word, meaning in words.items():
            data = data.replace(word, meaning.encode())
    return data
