"""Reading the configuration again while the daemon runs (SIGHUP)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from twisted.logger import Logger

from mediatord import __version__
from mediatord.config import Config, ConfigError
from mediatord.eventlog.logs import EventFile, SegmentLimits
from mediatord.eventlog.sealing import Sealer
from mediatord.eventlog.segments import RetentionLimits
from mediatord.identity import Identity
from mediatord.journal import Journal
from mediatord.service import Listener, StartupError
from mediatord.wiring.identities import PresentIdentity, load_identity, tell_change

_log = Logger()

Outcome = Literal["ok", "refused", "restart_needed"]

_HINT = "mediatord check-config lists all"
# What counts from now on; everything else is as it was when the daemon was started.
_APPLICABLE_LOG = ("level", "rotate", "retention", "key_days")
_APPLICABLE_ACCESS = ("registration", "allow", "deny")
_APPLICABLE = (
    "identity.former_dids",
    "identity.passphrase_file",
    "limits",
    "metrics",
    "websocket_origins",
    *(f"log.{name}" for name in _APPLICABLE_LOG),
    *(f"{half}.{name}" for half in ("didcomm", "decentrl") for name in _APPLICABLE_ACCESS),
)


def read_again(config: Config, identity: Identity, read: Callable[[], Config]) -> tuple[Config, Outcome, Identity]:
    """
    The configuration that counts from now on, what became of the one that was read, and the identity of the keys that
    the key file has by now; all is told to the operator, a refusal in a line.

    A file that is caught while it is written may say nothing of what it said before: it is not taken. Neither is
    anything if the keys cannot be used.

    :param config: the one that counts so far.
    :param identity: likewise.
    :param read: reads the configuration anew.
    """
    try:
        new, left = _read(config, read)
        new_identity = load_identity(new)
        if not new_identity.continues(identity):
            raise _Unusable(f"{new.identity.keys} has none of the keys that are served; restart if that is meant")
    except (_Unusable, StartupError) as error:
        _log.error("the configuration was not taken, nothing has changed: {why}", why=str(error))
        return config, "refused", identity
    if left:
        _log.warn("the configuration was read again; a restart is needed for {keys}", keys=", ".join(left))
    else:
        _log.info("the configuration was read again")
    tell_change(identity, new_identity)
    return new, "restart_needed" if left else "ok", new_identity


class _Unusable(Exception):
    """The text says why."""


def _read(config: Config, read: Callable[[], Config]) -> tuple[Config, list[str]]:
    """
    The configuration that would count, and the settings that would need a restart.

    :raise _Unusable: it cannot be taken.
    """
    try:
        new = read()
    except ConfigError as error:
        more = len(error.problems) - 1
        raise _Unusable(error.problems[0] + (f" (and {more} more; {_HINT})" if more else "")) from None
    left = [key for key in changed(config, new) if not is_applicable(key)]
    gone = [key for key in left if _is_set(config, key) and not _is_set(new, key)]
    if gone:
        raise _Unusable(f"it says nothing of {', '.join(gone)} any more; restart if that is meant")
    applied = {
        "identity": _taken(config.identity, new.identity, ("former_dids", "passphrase_file")),
        "limits": new.limits,
        "log": _taken(config.log, new.log, _APPLICABLE_LOG),
        "metrics": new.metrics,
        "websocket_origins": new.websocket_origins,
        "didcomm": _taken(config.didcomm, new.didcomm, _APPLICABLE_ACCESS),
        "decentrl": _taken(config.decentrl, new.decentrl, _APPLICABLE_ACCESS),
    }
    return config.model_copy(update=applied), left


def _taken(section: Any, new: Any, names: Iterable[str]) -> Any:
    """A section with some of its settings as they are now."""
    return section.model_copy(update={name: getattr(new, name) for name in names})


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


def is_applicable(key: str) -> bool:
    """Whether a setting counts as soon as the configuration was read again."""
    return any(f"{key}.".startswith(f"{one}.") for one in _APPLICABLE)


@dataclass(frozen=True, slots=True)
class LogFiles:
    """The event log, as far as settings of it may change."""

    events: EventFile
    sealer: Sealer

    def go_by(self, config: Config) -> None:
        """From now on."""
        self.events.limit(segment_limits(config), config.log.level)
        self.sealer.compress = config.log.rotate.compress


class Reloading:
    """
    Makes settings and keys count in a process that runs.

    :ivar config: what counts now.
    :ivar look_for_key: goes by the present key of the event log.
    """

    def __init__(
        self,
        config: Config,
        identity: PresentIdentity,
        log: LogFiles,
        journal: Journal,
        steady: Callable[[], float],
    ) -> None:
        self.config = config
        self._identity = identity
        self._log = log
        self._journal = journal
        self._steady = steady
        self._followers: list[Callable[[Config], None]] = []
        self._renewals: list[Callable[[], bool]] = []
        self.look_for_key: Callable[[], None] = lambda: None

    def follow(self, follower: Callable[[Config], None]) -> None:
        """Have it told whenever settings or keys have changed, or may have."""
        self._followers.append(follower)

    def renew_with(self, renewal: Callable[[], bool]) -> None:
        """Have other files read again, too, once a configuration was taken; it gives False where they are no good."""
        self._renewals.append(renewal)

    def watch(self, listener: Listener) -> None:
        """Have its certificate read again as well, if it has one."""
        self.renew_with(partial(self._renew, listener))
        self._tell_expiry(listener)

    def reload(self, read: Callable[[], Config]) -> None:
        """Read configuration and keys, apply what can be applied, and rotate the event log."""
        began = self._steady()
        self.apply(*read_again(self.config, self._identity.now, read), began)

    def apply(self, config: Config, outcome: Outcome, identity: Identity, began: float | None = None) -> None:
        """
        Go by these, and rotate the event log.

        :param began: when the configuration was asked for; just now unless given.
        """
        began = self._steady() if began is None else began
        self.config = config
        self._log.go_by(config)
        self.become(identity)
        renewed = outcome != "refused" and all([renew() for renew in self._renewals])
        try:
            self.look_for_key()
        except Exception:
            _log.failure("looking for the key of the event log failed")
        lines = self._log.events.segment_lines
        self._journal.reloaded(__version__, outcome, self._steady() - began, success=renewed)
        self._log.events.rotate(incidental=self._log.events.segment_lines - lines)

    def become(self, identity: Identity) -> None:
        """Go by these keys."""
        self._identity.become(identity)
        for follow in self._followers:
            follow(self.config)

    def _renew(self, listener: Listener) -> bool:
        renewed = listener.renew()
        self._tell_expiry(listener)
        return renewed

    def _tell_expiry(self, listener: Listener) -> None:
        if listener.certificate is not None:
            self._journal.metrics.certificate(listener.certificate.name, listener.certificate.expiry.timestamp())


def segment_limits(config: Config) -> SegmentLimits:
    """When segments of the event log are closed and deleted."""
    rotate, retention = config.log.rotate, config.log.retention
    kept = RetentionLimits(rotate.keep, retention.age, retention.bytes, retention.unread_bytes)
    return SegmentLimits(rotate.bytes, kept)
