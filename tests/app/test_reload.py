"""Reload of the configuration (analytics contract 4.2)."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from twisted.logger import formatEvent
from twisted.logger._capture import capturedLogs
from twisted.trial.unittest import SynchronousTestCase

from mediatord.app.current_identity import load_identity
from mediatord.app.reload import list_changed_settings, reload_config
from mediatord.config.file import ConfigError, load_config
from mediatord.config.settings import Config
from mediatord.identity.key_file import create_keys
from tests.http.in_memory_site import InMemorySite


class ReloadTests(SynchronousTestCase):
    """A daemon whose configuration the test changes."""

    def setUp(self) -> None:
        self.in_memory = InMemorySite(self)

    def changed_config(self, **sections: Any) -> Config:
        """The configuration with other values in some sections."""
        values = self.in_memory.config.model_dump()
        for name, changes in sections.items():
            values[name] = {**values[name], **changes} if isinstance(values[name], dict) else changes
        return Config.model_validate(values)

    def reload(self, read: Any) -> list[str]:
        """Reload and return what is logged."""
        with capturedLogs() as log_events:
            self.in_memory.base.reloader.reload(read)
        return [formatEvent(event) for event in log_events]

    def outcome(self) -> str:
        """The outcome in the last reload event, which ends its segment."""
        event = self.in_memory.events("proc.reload")[-1]
        self.assertGreaterEqual(event["dur_ms"], 0)
        reason: str = event["reason"]
        return reason

    def test_applied(self) -> None:
        """Level and segments of the log, and access to metrics."""
        self.assertEqual(self.in_memory.request("GET", "/metrics", peer="127.0.0.1").status, 200)
        changes = {"allow": ("192.0.2.0/24",), "queue_size_top": 1}
        rotate, retention = {"keep": 1, "bytes": 70_000, "compress": False}, {"bytes": 1, "unread_bytes": 1}
        new = self.changed_config(metrics=changes, log={"rotate": rotate, "retention": retention})
        self.assertEqual(self.reload(lambda: new), ["configuration reloaded"])
        self.assertEqual(self.in_memory.request("GET", "/metrics", peer="127.0.0.1").status, 403)
        self.assertEqual(self.in_memory.request("GET", "/metrics", peer="192.0.2.9").status, 200)
        for _ in range(2):
            self.in_memory.base.recorder.record_grant("did:web:a", "didcomm")
            self.in_memory.base.events.rotate()
        self.assertEqual(list(self.in_memory.config.log.directory.glob("events-*")), [])
        self.assertEqual(self.in_memory.counter("mediator_log_segments_deleted_total"), 2)

    def test_repeated_reloads(self) -> None:
        """However often it is reloaded, a segment without other events continues."""
        for _ in range(5):
            self.reload(lambda: self.in_memory.config)
        self.assertEqual(list(self.in_memory.config.log.directory.glob("events-*")), [])
        self.in_memory.base.recorder.record_grant("did:web:a", "didcomm")
        self.reload(lambda: self.in_memory.config)
        self.assertEqual(len(list(self.in_memory.config.log.directory.glob("events-*"))), 1)
        self.assertEqual(len(self.in_memory.events("proc.reload")), 6)

    def test_level(self) -> None:
        """From then on only events of this level are written."""
        self.reload(lambda: self.changed_config(log={"level": "warn"}))
        self.in_memory.base.recorder.record_grant("did:web:a", "didcomm")
        self.in_memory.base.recorder.record_denial("did:web:a", "policy", "didcomm")
        self.assertEqual(self.in_memory.events("acct.grant"), [])
        self.assertEqual(len(self.in_memory.events("acct.deny")), 1)
        self.reload(lambda: self.changed_config(log={"level": "info"}))
        self.assertEqual(self.outcome(), "ok")

    def test_restart_needed(self) -> None:
        """Settings that cannot be applied are named and unchanged; others are applied."""
        new = self.changed_config(queue={"ttl": 60.0}, node="other", log={"level": "warn", "dids": "keyed"})
        lines = self.reload(lambda: new)
        self.assertEqual(lines, ["configuration reloaded; restart to apply node, queue.ttl, log.dids"])
        self.assertEqual(self.in_memory.base.reloader.config.log.level, "warn")
        self.assertEqual(self.in_memory.base.reloader.config.queue.ttl, self.in_memory.config.queue.ttl)
        back = self.reload(lambda: self.in_memory.config)
        self.assertEqual((back, self.outcome()), (["configuration reloaded"], "ok"))

    def test_restart_needed_is_logged(self) -> None:
        """Also in the event log."""
        self.reload(lambda: self.changed_config(node="other"))
        self.assertEqual(self.outcome(), "restart_needed")

    def test_refused(self) -> None:
        """An error is one line, and nothing changes; the log begins a segment nevertheless."""

        def invalid() -> Config:
            raise ConfigError(["mediator.yaml:3: log.level: expected info", "mediator.yaml:9: more"])

        self.in_memory.base.recorder.record_grant("did:web:a", "didcomm")
        lines = self.reload(invalid)
        self.assertEqual(
            lines,
            [
                "configuration rejected, keeping the previous settings: mediator.yaml:3: log.level: expected info "
                "(and 1 more; run `mediatord check-config` to list all)"
            ],
        )
        self.assertEqual(self.outcome(), "refused")
        self.assertIs(self.in_memory.base.reloader.config, self.in_memory.config)
        self.assertEqual(len(self.in_memory.events("log.open")), 2)


class FileTests(SynchronousTestCase):
    """A daemon and its configuration file."""

    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.path = Path(directory.name) / "mediator.yaml"
        self.text = "public_url: https://m.example\nlog: {rotate: {keep: 500}}\nstorage: {sqlite: {path: a.db}}\n"
        self.config = self.read(self.text)
        create_keys(self.config.identity.keys)
        self.identity = load_identity(self.config)

    def read(self, text: str) -> Config:
        self.path.write_text(text)
        return load_config(self.path, {})

    def reload_text(self, text: str) -> tuple[int, str, str]:
        """Reload this file; return the number of kept segments, the outcome and what is logged."""
        with capturedLogs() as log_events:
            config, outcome, _ = reload_config(self.config, self.identity, lambda: self.read(text))
        (event,) = log_events
        return config.log.rotate.keep, outcome, formatEvent(event)

    def test_partly_written_file(self) -> None:
        """Nothing of a truncated file is applied."""
        for text in ("", "# new\n"):
            self.assertEqual(self.reload_text(text)[:2], (500, "refused"))
        gone = "the file no longer sets storage.sqlite.path; set it again, or restart if the removal is intended"
        refused = f"configuration rejected, keeping the previous settings: {gone}"
        self.assertEqual(self.reload_text(self.text[: self.text.index("log:")]), (500, "refused", refused))

    def test_changed_values(self) -> None:
        """Changed values, defaults included, are no sign of a truncated file."""
        by_default = self.text.replace("a.db", str(Config().storage.sqlite.path)).replace("500", "7")
        self.assertEqual(self.reload_text(by_default)[:2], (7, "restart_needed"))
        self.assertEqual(
            self.reload_text("public_url: https://m.example\nstorage: {sqlite: {path: a.db}}\n")[1], "ok"
        )


def test_changed_settings() -> None:
    """Every changed setting by name, in the order of the file; entries that the operator names are one setting."""
    one = Config()
    other = Config.model_validate(
        {
            "didcomm": {"failover": "configured", "endpoints": {"did:web:a.example": "https://a.example/inbox"}},
            "storage": {"mongodb": {"uri": "mongodb://u:secret@127.0.0.1/mediatord"}},
            "workers": 2,
        }
    )
    assert list_changed_settings(one, one) == []
    assert list_changed_settings(one, other) == [
        "storage.mongodb.uri",
        "didcomm.failover",
        "didcomm.endpoints",
        "workers",
    ]
