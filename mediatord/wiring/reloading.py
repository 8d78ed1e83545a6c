"""Reading the configuration again while the daemon runs (SIGHUP)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from twisted.logger import Logger

from mediatord import __version__
from mediatord.config import Config, ConfigError
from mediatord.eventlog.logs import EventFile, SegmentLimits
from mediatord.eventlog.sealing import Sealer
from mediatord.journal import Journal

_log = Logger()

Outcome = Literal["ok", "refused", "restart_needed"]

# What counts from now on; everything else is as it was when the daemon was started.
_APPLICABLE_LOG = ("level", "rotate", "key_days")
_APPLICABLE = ("metrics", *(f"log.{name}" for name in _APPLICABLE_LOG))


def read_again(config: Config, read: Callable[[], Config]) -> tuple[Config, Outcome]:
    """
    The configuration that counts from now on, and what became of it; both are told to the operator in a line.

    :param config: the one that counts so far.
    :param read: reads it anew.
    """
    try:
        new = read()
    except ConfigError as error:
        more = len(error.problems) - 1
        hint = f" (and {more} more; mediatord check-config lists all)" if more else ""
        _log.error(
            "the configuration was not taken, nothing has changed: {why}{hint}", why=error.problems[0], hint=hint
        )
        return config, "refused"
    left = [key for key in changed(config, new) if not _is_applicable(key)]
    if left:
        _log.warn("the configuration was read again; a restart is needed for {keys}", keys=", ".join(left))
    else:
        _log.info("the configuration was read again")
    log = config.log.model_copy(update={name: getattr(new.log, name) for name in _APPLICABLE_LOG})
    return config.model_copy(update={"log": log, "metrics": new.metrics}), "restart_needed" if left else "ok"


def changed(one: Config, other: Config) -> list[str]:
    """Settings that differ, in the order of the file, with dots between the names of sections and keys."""
    before, after = dict(_flat(one.model_dump())), dict(_flat(other.model_dump()))
    return [key for key in before if before[key] != after[key]]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        # A mapping that the operator fills is one setting.
        if isinstance(value, dict) and _is_section(prefix + name):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _is_section(key: str) -> bool:
    model: Any = Config
    for name in key.split("."):
        model = model.model_fields[name].annotation
    return hasattr(model, "model_fields")


def _is_applicable(key: str) -> bool:
    return any(f"{key}.".startswith(f"{one}.") for one in _APPLICABLE)


class Reloading:
    """
    Makes settings count in a process that runs.

    :ivar config: what counts now.
    :ivar look_for_key: goes by the present key of the event log.
    """

    def __init__(
        self, config: Config, events: EventFile, sealer: Sealer, journal: Journal, steady: Callable[[], float]
    ) -> None:
        self.config = config
        self._events = events
        self._sealer = sealer
        self._journal = journal
        self._steady = steady
        self.look_for_key: Callable[[], None] = lambda: None

    def reload(self, read: Callable[[], Config]) -> None:
        """Read the configuration, apply what can be applied, and begin a segment of the event log."""
        began = self._steady()
        self.apply(*read_again(self.config, read), began)

    def apply(self, config: Config, outcome: Outcome, began: float | None = None) -> None:
        """
        Go by this configuration, and begin a segment of the event log.

        :param began: when the configuration was asked for; just now unless given.
        """
        began = self._steady() if began is None else began
        self.config = config
        self._events.limit(segment_limits(config), config.log.level)
        self._sealer.compress = config.log.rotate.compress
        self.look_for_key()
        self._journal.reloaded(__version__, outcome, self._steady() - began)
        self._events.rotate()


def segment_limits(config: Config) -> SegmentLimits:
    """When segments of the event log are closed and deleted."""
    return SegmentLimits(config.log.rotate.bytes, config.log.rotate.keep)
