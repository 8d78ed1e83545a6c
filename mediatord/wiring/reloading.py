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

_HINT = "mediatord check-config lists all"
# What counts from now on; everything else is as it was when the daemon was started.
_APPLICABLE_LOG = ("level", "rotate", "key_days")
_APPLICABLE = ("metrics", *(f"log.{name}" for name in _APPLICABLE_LOG))


def read_again(config: Config, read: Callable[[], Config]) -> tuple[Config, Outcome]:
    """
    The configuration that counts from now on, and what became of it; both are told to the operator in a line.

    A file that is caught while it is written may say nothing of what it said before: it is not taken.

    :param config: the one that counts so far.
    :param read: reads it anew.
    """
    try:
        new = read()
    except ConfigError as error:
        more = len(error.problems) - 1
        return _refused(config, error.problems[0] + (f" (and {more} more; {_HINT})" if more else ""))
    left = [key for key in changed(config, new) if not _is_applicable(key)]
    gone = [key for key in left if _is_set(config, key) and not _is_set(new, key)]
    if gone:
        return _refused(config, f"it says nothing of {', '.join(gone)} any more; restart if that is meant")
    if left:
        _log.warn("the configuration was read again; a restart is needed for {keys}", keys=", ".join(left))
    else:
        _log.info("the configuration was read again")
    log = config.log.model_copy(update={name: getattr(new.log, name) for name in _APPLICABLE_LOG})
    return config.model_copy(update={"log": log, "metrics": new.metrics}), "restart_needed" if left else "ok"


def _refused(config: Config, why: str) -> tuple[Config, Outcome]:
    _log.error("the configuration was not taken, nothing has changed: {why}", why=why)
    return config, "refused"


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


def _is_set(config: Config, key: str) -> bool:
    """Whether the operator has said what it is, be that what it is by default."""
    model: Any = config
    for name in key.split("."):
        if name not in model.model_fields_set:
            return False
        model = getattr(model, name)
    return True


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
        try:
            self.look_for_key()
        except Exception:
            _log.failure("looking for the key of the event log failed")
        self._journal.reloaded(__version__, outcome, self._steady() - began)
        self._events.rotate()


def segment_limits(config: Config) -> SegmentLimits:
    """When segments of the event log are closed and deleted."""
    return SegmentLimits(config.log.rotate.bytes, config.log.rotate.keep)
