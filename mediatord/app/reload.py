"""
Who the mediator of a configuration is.

Reading the configuration again while the daemon runs (SIGHUP).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from twisted.logger import Logger

from mediatord import __version__
from mediatord.config.file import ConfigError
from mediatord.config.settings import Config
from mediatord.errors import StartupError
from mediatord.identity.encrypted_file import make_passphrase_source
from mediatord.identity.key_file import KeySet, NamedKey, load_keys, parse_keys
from mediatord.identity.mediator_identity import IdentityError, MediatorIdentity, abbreviate_did
from mediatord.net.listeners import Listener
from mediatord.observability.event_log import EventLogWriter, SegmentLimits, SegmentSealer
from mediatord.observability.event_recorder import EventRecorder
from mediatord.observability.segments import RetentionLimits
from mediatord.private_file import PrivateFileError
from mediatord.protocol.didcomm import jwe_algorithms
from mediatord.protocol.didcomm.keys import PrivateKey

_log = Logger()


class CurrentIdentity:
    """
    The identity that counts, which is another one once keys have been rotated.

    :ivar now: the whole of it.
    :ivar own_dids: as of :class:`MediatorIdentity`, like `decentrl_dids`; always the same set, changed in place.
    """

    def __init__(self, identity: MediatorIdentity) -> None:
        self.now = identity
        self.own_dids = set(identity.own_dids)
        self.decentrl_dids = set(identity.decentrl_dids)
        self._forgetting: list[Callable[[], None]] = [jwe_algorithms.clear_key_caches]

    def on_change(self, forget: Callable[[], None]) -> None:
        """Have what was made of the keys forgotten when they are others."""
        self._forgetting.append(forget)

    def become(self, identity: MediatorIdentity) -> None:
        """Be another; no secret that was agreed with keys outlives them."""
        self.now = identity
        self.own_dids.clear()
        self.own_dids.update(identity.own_dids)
        self.decentrl_dids.clear()
        self.decentrl_dids.update(identity.decentrl_dids)
        for forget in self._forgetting:
            forget()

    @property
    def did(self) -> str:
        """The did:peer:2 of the current keys."""
        return self.now.did

    @property
    def web_did(self) -> str:
        """The did:web."""
        return self.now.web_did

    @property
    def web_document(self) -> dict[str, Any]:
        """Its document."""
        return self.now.web_document

    def owns(self, did: str) -> bool:
        """As of :class:`Identity`."""
        return self.now.owns(did)

    def routing_did(self, addressed: str) -> str:
        """As of :class:`Identity`."""
        return self.now.routing_did(addressed)

    def find_agreement_keys(self, kid: str) -> tuple[PrivateKey, ...]:
        """As of :class:`Identity`."""
        return self.now.find_agreement_keys(kid)

    def find_signing_key(self, kid: str) -> NamedKey | None:
        """As of :class:`Identity`."""
        return self.now.find_signing_key(kid)


def load_identity(config: Config) -> MediatorIdentity:
    """
    Our keys and DIDs.

    :raise StartupError: the key file or a former DID cannot be used.
    """
    return _build_identity(
        config, lambda: load_keys(config.identity.keys, make_passphrase_source(config.identity.passphrase_file))
    )


def parse_identity(config: Config, keys: str) -> MediatorIdentity:
    """
    The same with keys that somebody has read already.

    :param keys: the content of a key file.
    :raise StartupError: they or a former DID cannot be used.
    """
    return _build_identity(config, lambda: parse_keys(keys.encode("utf-8"), config.identity.keys))


def plan_key_rollout(before: MediatorIdentity, after: MediatorIdentity) -> list[KeySet]:
    """
    The keys by which several processes get from one identity to another, each stage after all have reached the one
    before: first everybody accepts what comes, and only then anybody tells it.
    """
    known = {kid: key for kid, key in before.keys}  # noqa: C416  a KeySet is no mapping, though dict() takes it for one
    coming = tuple((kid, key) for kid, key in after.keys if known.get(kid) != key)
    if not coming or any(kid in known for kid, _ in coming):
        return [after.keys]
    return [replace(before.keys, prepared=(*before.keys.prepared, *coming)), after.keys]


def log_identity_change(before: MediatorIdentity, after: MediatorIdentity) -> None:
    """Tell the operator what has changed for wallets."""
    if after.did != before.did:
        _log.info(
            "the DID is {did} now; former ones that are accepted as well: {count}",
            did=abbreviate_did(after.did),
            count=len(after.former_peer_dids) + len(after.former_dids),
        )
    for did in after.prepared_dids:
        if not before.owns(did):
            _log.info("the DID {did} is accepted and not told to anybody yet", did=abbreviate_did(did))
    gone = after.find_missing_dids(before)
    if gone:
        _log.warn("no longer accepted: {dids}", dids=", ".join(map(abbreviate_did, gone)))


def _build_identity(config: Config, keys: Callable[[], KeySet]) -> MediatorIdentity:
    try:
        return MediatorIdentity(
            keys(), config.public_url, config.identity.former_dids, raw_keys=config.decentrl.raw_keys
        )
    except (PrivateFileError, IdentityError) as error:
        raise StartupError(str(error)) from None


ReloadOutcome = Literal["ok", "refused", "restart_needed"]

_CHECK_CONFIG_HINT = "mediatord check-config lists all"
# What counts from now on; everything else is as it was when the daemon was started.
_RELOADABLE_LOG = ("level", "rotate", "retention", "key_days")
_RELOADABLE_ACCESS = ("registration", "allow", "deny")
_RELOADABLE = (
    "identity.former_dids",
    "identity.passphrase_file",
    "limits",
    "metrics",
    "websocket_origins",
    *(f"log.{name}" for name in _RELOADABLE_LOG),
    *(f"{half}.{name}" for half in ("didcomm", "decentrl") for name in _RELOADABLE_ACCESS),
)


def reload_config(
    config: Config, identity: MediatorIdentity, read: Callable[[], Config]
) -> tuple[Config, ReloadOutcome, MediatorIdentity]:
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
        new, left = _read_config(config, read)
        new_identity = load_identity(new)
        if not new_identity.is_successor_of(identity):
            raise _ConfigRejection(
                f"{new.identity.keys} has none of the keys that are served; restart if that is meant"
            )
    except (_ConfigRejection, StartupError) as error:
        _log.error("the configuration was not taken, nothing has changed: {why}", why=str(error))
        return config, "refused", identity
    if left:
        _log.warn("the configuration was read again; a restart is needed for {keys}", keys=", ".join(left))
    else:
        _log.info("the configuration was read again")
    log_identity_change(identity, new_identity)
    return new, "restart_needed" if left else "ok", new_identity


class _ConfigRejection(Exception):
    """The text says why."""


def _read_config(config: Config, read: Callable[[], Config]) -> tuple[Config, list[str]]:
    """
    The configuration that would count, and the settings that would need a restart.

    :raise _Unusable: it cannot be taken.
    """
    try:
        new = read()
    except ConfigError as error:
        more = len(error.problems) - 1
        raise _ConfigRejection(
            error.problems[0] + (f" (and {more} more; {_CHECK_CONFIG_HINT})" if more else "")
        ) from None
    left = [key for key in list_changed_settings(config, new) if not is_reloadable(key)]
    gone = [key for key in left if _is_explicitly_set(config, key) and not _is_explicitly_set(new, key)]
    if gone:
        raise _ConfigRejection(f"it says nothing of {', '.join(gone)} any more; restart if that is meant")
    applied = {
        "identity": _copy_settings(config.identity, new.identity, ("former_dids", "passphrase_file")),
        "limits": new.limits,
        "log": _copy_settings(config.log, new.log, _RELOADABLE_LOG),
        "metrics": new.metrics,
        "websocket_origins": new.websocket_origins,
        "didcomm": _copy_settings(config.didcomm, new.didcomm, _RELOADABLE_ACCESS),
        "decentrl": _copy_settings(config.decentrl, new.decentrl, _RELOADABLE_ACCESS),
    }
    return config.model_copy(update=applied), left


def _copy_settings(section: Any, new: Any, names: Iterable[str]) -> Any:
    """A section with some of its settings as they are now."""
    return section.model_copy(update={name: getattr(new, name) for name in names})


def list_changed_settings(one: Config, other: Config) -> list[str]:
    """Settings that differ, in the order of the file, with dots between the names of sections and keys."""
    before, after = dict(_flatten_settings(one.model_dump())), dict(_flatten_settings(other.model_dump()))
    return [key for key in before if before[key] != after[key]]


def _flatten_settings(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        # A mapping that the operator fills is one setting.
        if isinstance(value, dict) and _is_section(prefix + name):
            yield from _flatten_settings(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _is_section(key: str) -> bool:
    model: Any = Config
    for name in key.split("."):
        model = model.model_fields[name].annotation
    return hasattr(model, "model_fields")


def _is_explicitly_set(config: Config, key: str) -> bool:
    """Whether the operator has said what it is, be that what it is by default."""
    model: Any = config
    for name in key.split("."):
        if name not in model.model_fields_set:
            return False
        model = getattr(model, name)
    return True


def is_reloadable(key: str) -> bool:
    """Whether a setting counts as soon as the configuration was read again."""
    return any(f"{key}.".startswith(f"{one}.") for one in _RELOADABLE)


@dataclass(frozen=True, slots=True)
class ReloadableEventLog:
    """The event log, as far as settings of it may change."""

    events: EventLogWriter
    sealer: SegmentSealer

    def go_by(self, config: Config) -> None:
        """From now on."""
        self.events.limit(build_segment_limits(config), config.log.level)
        self.sealer.compress = config.log.rotate.compress


class ConfigReloader:
    """
    Makes settings and keys count in a process that runs.

    :ivar config: what counts now.
    :ivar look_for_key: goes by the present key of the event log.
    """

    def __init__(
        self,
        config: Config,
        identity: CurrentIdentity,
        log: ReloadableEventLog,
        recorder: EventRecorder,
        steady: Callable[[], float],
    ) -> None:
        self.config = config
        self._identity = identity
        self._log = log
        self._recorder = recorder
        self._steady = steady
        self._followers: list[Callable[[Config], None]] = []
        self._renewals: list[Callable[[], bool]] = []
        self.refresh_log_key: Callable[[], None] = lambda: None

    def follow(self, follower: Callable[[Config], None]) -> None:
        """Have it told whenever settings or keys have changed, or may have."""
        self._followers.append(follower)

    def add_renewal(self, renewal: Callable[[], bool]) -> None:
        """Have other files read again, too, once a configuration was taken; it gives False where they are no good."""
        self._renewals.append(renewal)

    def watch(self, listener: Listener) -> None:
        """Have its certificate read again as well, if it has one."""
        self.add_renewal(partial(self._renew, listener))
        self._record_expiry(listener)

    def reload(self, read: Callable[[], Config]) -> None:
        """Read configuration and keys, apply what can be applied, and rotate the event log."""
        began = self._steady()
        self.apply(*reload_config(self.config, self._identity.now, read), began)

    def apply(
        self, config: Config, outcome: ReloadOutcome, identity: MediatorIdentity, began: float | None = None
    ) -> None:
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
            self.refresh_log_key()
        except Exception:
            _log.failure("looking for the key of the event log failed")
        lines = self._log.events.segment_lines
        self._recorder.record_reload(__version__, outcome, self._steady() - began, success=renewed)
        self._log.events.rotate(ignored_lines=self._log.events.segment_lines - lines)

    def become(self, identity: MediatorIdentity) -> None:
        """Go by these keys."""
        self._identity.become(identity)
        for follow in self._followers:
            follow(self.config)

    def _renew(self, listener: Listener) -> bool:
        renewed = listener.renew()
        self._record_expiry(listener)
        return renewed

    def _record_expiry(self, listener: Listener) -> None:
        if listener.certificate is not None:
            self._recorder.metrics.set_certificate_expiry(
                listener.certificate.name, listener.certificate.expiry.timestamp()
            )


def build_segment_limits(config: Config) -> SegmentLimits:
    """When segments of the event log are closed and deleted."""
    rotate, retention = config.log.rotate, config.log.retention
    kept = RetentionLimits(rotate.keep, retention.age, retention.bytes, retention.unread_bytes)
    return SegmentLimits(rotate.bytes, kept)
