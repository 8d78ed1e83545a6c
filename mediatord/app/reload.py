"""Configuration reload (SIGHUP): which settings may change while the daemon runs, and applying them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from twisted.logger import Logger

from mediatord import __version__
from mediatord.app.current_identity import CurrentIdentity, load_identity, log_identity_change
from mediatord.config.file import ConfigError
from mediatord.config.settings import Config, SettingsSection
from mediatord.errors import StartupError
from mediatord.identity.mediator_identity import MediatorIdentity
from mediatord.net.listeners import Listener
from mediatord.observability.event_log import EventLogWriter, SegmentSealer
from mediatord.observability.event_recorder import EventRecorder
from mediatord.observability.segments import SegmentLimits

_log = Logger()


ReloadOutcome = Literal["ok", "refused", "restart_needed"]

_CHECK_CONFIG_HINT = "run `mediatord check-config` to list all"
# All other settings take effect at the next start.
_RELOADABLE_PARTS = {
    "identity": ("former_dids", "passphrase_file"),
    "log": ("level", "rotate", "retention", "key_days"),
    "didcomm": ("registration", "allow", "deny"),
    "decentrl": ("registration", "allow", "deny"),
}
_RELOADABLE = (
    "limits",
    "metrics",
    "websocket_origins",
    *(f"{section}.{name}" for section, names in _RELOADABLE_PARTS.items() for name in names),
)


def reload_config(
    config: Config, identity: MediatorIdentity, read: Callable[[], Config]
) -> tuple[Config, ReloadOutcome, MediatorIdentity]:
    """
    Read configuration and key file again; returns the configuration to use, the outcome, and the identity to use.

    The outcome is logged. A configuration that lacks explicit settings of the current one is rejected, since the file
    may be half written; so is everything if the keys cannot be used.

    :param config: the current configuration.
    :param identity: the current identity.
    :param read: reads the configuration.
    """
    try:
        new, left = _read_config(config, read)
        new_identity = load_identity(new)
        if not new_identity.is_successor_of(identity):
            raise _ConfigRejection(f"{new.identity.keys} has none of the keys in use; restart to change the identity")
    except (_ConfigRejection, StartupError) as error:
        _log.error("configuration rejected, keeping the previous settings: {why}", why=str(error))
        return config, "refused", identity
    if left:
        _log.warn("configuration reloaded; restart to apply {keys}", keys=", ".join(left))
    else:
        _log.info("configuration reloaded")
    log_identity_change(identity, new_identity)
    return new, "restart_needed" if left else "ok", new_identity


class _ConfigRejection(Exception):
    """The new configuration cannot be used; the text says why."""


def _read_config(config: Config, read: Callable[[], Config]) -> tuple[Config, list[str]]:
    """
    The configuration to use, and the changed settings that need a restart.

    :raise _ConfigRejection: the new configuration cannot be used.
    """
    try:
        new = read()
    except ConfigError as error:
        more = len(error.problems) - 1
        raise _ConfigRejection(
            error.problems[0] + (f" (and {more} more; {_CHECK_CONFIG_HINT})" if more else "")
        ) from None
    left = [key for key in list_changed_settings(config, new) if not is_reloadable(key)]
    lost = _list_explicit_settings(config) - _list_explicit_settings(new)
    gone = [key for key in left if key in lost]
    if gone:
        raise _ConfigRejection(
            f"the file no longer sets {', '.join(gone)}; set it again, or restart if the removal is intended"
        )
    applied = {section: getattr(new, section) for section in ("limits", "metrics", "websocket_origins")}
    for section, names in _RELOADABLE_PARTS.items():
        current, changed = getattr(config, section), getattr(new, section)
        applied[section] = current.model_copy(update={name: getattr(changed, name) for name in names})
    return config.model_copy(update=applied), left


def list_changed_settings(one: Config, other: Config) -> list[str]:
    """Dotted names of the settings that differ, in the order of the file."""
    before, after = ({key: value for key, value, _ in _flatten_settings(config)} for config in (one, other))
    return [key for key in before if before[key] != after[key]]


def _list_explicit_settings(config: Config) -> set[str]:
    """Dotted names of the settings that the operator has set, even to their defaults."""
    return {key for key, _, is_explicit in _flatten_settings(config) if is_explicit}


def _flatten_settings(
    section: SettingsSection, prefix: str = "", *, is_explicit: bool = True
) -> Iterator[tuple[str, Any, bool]]:
    """Dotted names and values of all settings, and whether they were set explicitly."""
    for name, value in section:
        is_set = is_explicit and name in section.model_fields_set
        if isinstance(value, SettingsSection):
            yield from _flatten_settings(value, f"{prefix}{name}.", is_explicit=is_set)
        else:
            yield prefix + name, value, is_set


def is_reloadable(key: str) -> bool:
    """Whether a change of this setting takes effect at a reload."""
    return any(f"{key}.".startswith(f"{one}.") for one in _RELOADABLE)


class ConfigReloader:
    """
    Applies changed settings and keys to the running process.

    :param rotate_log_key: switches the event log to the key of the current epoch.
    :ivar config: the current configuration.
    """

    def __init__(
        self,
        config: Config,
        identity: CurrentIdentity,
        events: EventLogWriter,
        sealer: SegmentSealer,
        recorder: EventRecorder,
        monotonic: Callable[[], float],
        rotate_log_key: Callable[[], None],
    ) -> None:
        self.config = config
        self._identity = identity
        self._events = events
        self._sealer = sealer
        self._recorder = recorder
        self._monotonic = monotonic
        self._rotate_log_key = rotate_log_key
        self._followers: list[Callable[[Config], None]] = []
        self._renewals: list[Callable[[], bool]] = []

    def follow(self, follower: Callable[[Config], None]) -> None:
        """Call this whenever settings or keys may have changed."""
        self._followers.append(follower)

    def add_renewal(self, renewal: Callable[[], bool]) -> None:
        """Call this after each accepted configuration to read other files; False if they cannot be used."""
        self._renewals.append(renewal)

    def add_listener(self, listener: Listener) -> None:
        """Renew the certificate of a listener at each reload, if it has one."""

        def record_expiry() -> None:
            if listener.certificate is not None:
                expiry = self._recorder.metrics.certificate_expiry.labels(listener.certificate.name)
                expiry.set(listener.certificate.expiry.timestamp())

        def renew() -> bool:
            is_renewed = listener.renew()
            record_expiry()
            return is_renewed

        self.add_renewal(renew)
        record_expiry()

    def reload(self, read: Callable[[], Config]) -> None:
        """Read configuration and keys, apply what may change at runtime, and rotate the event log."""
        began = self._monotonic()
        self.apply(*reload_config(self.config, self._identity.now, read), began)

    def apply(
        self, config: Config, outcome: ReloadOutcome, identity: MediatorIdentity, began: float | None = None
    ) -> None:
        """
        Apply these, and rotate the event log.

        :param began: when the reload began; now by default.
        """
        began = self._monotonic() if began is None else began
        self.config = config
        self._events.limit(build_segment_limits(config), config.log.level)
        self._sealer.compress = config.log.rotate.compress
        self.use_identity(identity)
        renewed = outcome != "refused" and all([renew() for renew in self._renewals])
        try:
            self._rotate_log_key()
        except Exception:
            _log.failure("renewing the pseudonym key of the event log failed")
        lines = self._events.segment_lines
        self._recorder.record_reload(__version__, outcome, self._monotonic() - began, success=renewed)
        self._events.rotate(ignored_lines=self._events.segment_lines - lines)

    def use_identity(self, identity: MediatorIdentity) -> None:
        """Switch to another identity."""
        self._identity.switch_to(identity)
        for follow in self._followers:
            follow(self.config)


def build_segment_limits(config: Config) -> SegmentLimits:
    """The limits at which segments of the event log are closed and deleted."""
    rotate, retention = config.log.rotate, config.log.retention
    return SegmentLimits(rotate.bytes, rotate.keep, retention.age, retention.bytes, retention.unread_bytes)
