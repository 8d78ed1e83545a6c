"""What store operations are observed by, and how much may be batched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from twisted.logger import Logger

_log = Logger(namespace="mediatord.store")


class Observer(Protocol):
    """Told how long something took, in seconds."""

    def __call__(self, operation: str, seconds: float, /) -> None: ...


def unobserved(_operation: str, _seconds: float, /) -> None:
    """Nobody wants to know."""


def log_fault(what: str, error: BaseException | None) -> None:
    """Log that something failed by the kind of error only: its text may show what was stored."""
    code = getattr(error, "sqlite_errorname", None)
    _log.error("{what}: {error} {code}", event="store.failed", what=what, error=type(error).__name__, code=code)


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much goes into one batch, and how much may wait for one before more is refused."""

    batch: int = 512
    batch_bytes: int = 8_388_608
    waiting: int = 20_000
    waiting_bytes: int = 134_217_728


