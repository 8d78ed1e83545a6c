"""The event schema, and the pseudonyms in events (analytics contract 2.2 and 2.6)."""

from __future__ import annotations

import json
import math
from hashlib import blake2b
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediatord.observability.event_schema import (
    ENVELOPE,
    EVENTS,
    FIELDS,
    build_json_schema,
    render_json_schema,
    validate_fields,
)
from mediatord.observability.pseudonyms import Pseudonymizer, PseudonymKey, create_pseudonym_key, load_pseudonym_key
from mediatord.runtime.secret_files import SecretFileError
from tests.observability.memory_event_log import MemoryEventLog

KEY = PseudonymKey(3, b"k" * 32)
DID = "did:peer:2.Ez6LSc1YK7J47otkPx5smthWsH492pKyRthNs7XYiXo1GCnpR.Vz6MkknhhwAGsRrcTTthPSsBbQtrNX6CMqt4poro5jdP6uCue"

# A second copy of the schema on which readers of the log rely.
SCHEMA = {
    "log.open": "version schema segment",
    "log.close": "seq_first seq_last lines dropped",
    "log.drop": "dropped reason",
    "proc.start": "version reason dur_ms",
    "proc.stop": "version reason dur_ms",
    "proc.reload": "version reason dur_ms",
    "conn.open": "conn transport peer",
    "conn.auth": "conn did proto code",
    "conn.close": "conn did proto dur_ms ws_code reason n_in n_out bytes_in bytes_out",
    "req.done": "req conn proto mtype status code size dur_ms crypto_ms sender peer",
    "msg.accept": "msg req sender rcpt proto size ttl_s method",
    "msg.push": "msg rcpt conn proto path attempt latency_ms ok",
    "msg.ack": "msg rcpt proto path latency_ms",
    "msg.expire": "msg rcpt proto size age_ms reason pushes",
    "msg.evict": "msg rcpt proto size age_ms reason pushes",
    "msg.remove": "msg rcpt proto size age_ms reason pushes",
    "limit.hit": "who limit retry_after_s peer",
    "replay.drop": "sender code age_ms",
    "acct.grant": "did proto reason n_added n_removed",
    "acct.deny": "did proto reason n_added n_removed",
    "acct.expire": "did proto reason n_added n_removed",
    "acct.update": "did proto reason n_added n_removed",
    "push.wake": "did proto service outcome code status age_ms dur_ms retry_after_s",
    "push.forget": "did proto service reason",
    "gauge": "depth bytes rcpts oldest_ms conns rss fds lag_ms",
    "ledger": (
        "proto store all_accepted all_acknowledged all_expired all_evicted all_removed all_withdrawn waiting "
        "difference own_accepted own_acknowledged own_expired own_evicted"
    ),
    "counters": (
        "forwarded stored delivered expired evicted requests_accepted requests_rejected requests_failed connections"
    ),
}


def test_schema_is_complete() -> None:
    """Events and fields are exactly those of the schema."""
    assert {name: set(event.fields) for name, event in EVENTS.items()} == {
        name: set(fields.split()) for name, fields in SCHEMA.items()
    }


def test_fields_are_used_and_documented() -> None:
    """FIELDS has exactly what events use; none has the name of an envelope field."""
    assert {field for event in EVENTS.values() for field in event.fields} == set(FIELDS)
    assert not set(FIELDS) & set(ENVELOPE)
    assert all(meaning for _, meaning in (FIELDS | ENVELOPE).values())


def test_none_is_omitted() -> None:
    """A field that is None is omitted."""
    assert validate_fields("msg.ack", {"msg": "m", "path": None}) == {"msg": "m"}


def test_numbers_are_rounded() -> None:
    """Milliseconds have three decimals; integers stay integers."""
    assert validate_fields("msg.ack", {"latency_ms": 1.23456}) == {"latency_ms": 1.235}
    assert validate_fields("msg.ack", {"latency_ms": 2}) == {"latency_ms": 2}


@pytest.mark.parametrize(
    ("event", "fields"),
    [
        ("msg.lost", {}),
        ("msg.ack", {"payload": "x"}),
        ("msg.ack", {"msg": 3}),
        ("msg.ack", {"msg": b"m"}),
        ("msg.push", {"attempt": 1.0}),
        ("msg.push", {"attempt": True}),
        ("msg.push", {"ok": 1}),
    ],
)
def test_undeclared(event: str, fields: dict[str, object]) -> None:
    """An undeclared event, field or type is an error, every time."""
    for _ in range(2):
        with pytest.raises(TypeError):
            MemoryEventLog().emit(event, **fields)


def test_valid_call_does_not_hide_invalid_one() -> None:
    """A cached check does not accept the same fields with other types."""
    log = MemoryEventLog()
    log.emit("msg.push", msg="m", attempt=1)
    with pytest.raises(TypeError):
        log.emit("msg.push", msg="m", attempt="1")
    with pytest.raises(TypeError):
        log.emit("msg.ack", msg="m", attempt=1)
    assert log.named("msg.push") == [{"msg": "m", "attempt": 1}]


def test_json_schema() -> None:
    """The JSON Schema has one alternative per event, with all fields and no others."""
    schema = json.loads(json.dumps(build_json_schema()))
    assert schema["required"] == list(ENVELOPE)
    for line in schema["oneOf"]:
        name = line["properties"]["event"]["const"]
        assert set(line["properties"]) == set(ENVELOPE) | set(EVENTS[name].fields)
        assert line["additionalProperties"] is False
    assert len(schema["oneOf"]) == len(EVENTS)


def test_schema_file() -> None:
    """The published file is what `python -m mediatord.observability.event_schema` writes."""
    written = Path(__file__).parents[2] / "docs/reference" / "event-log.schema.json"
    assert written.read_text("utf-8") == render_json_schema()


def test_reference_table() -> None:
    """The table in the documentation has a row for every event."""
    table = _render_event_table()
    assert all(f"``{name}``" in table for name in EVENTS)
    assert table.count("   * - ") == len(EVENTS) + 1


def test_plain_pseudonyms() -> None:
    """Plain: up to 80 characters unchanged, a longer DID by its prefix and a hash."""
    tags = Pseudonymizer("plain", KEY)
    assert tags.did("did:web:m.example") == "did:web:m.example"
    assert tags.did("d" * 80) == "d" * 80
    assert tags.did(DID) == DID[:24] + "~" + blake2b(DID.encode(), digest_size=8).hexdigest()
    assert tags.message("6f1c") == "6f1c"


def test_keyed_pseudonyms() -> None:
    """Keyed: 32 hexadecimal digits that depend on the key and on the kind, DID or message id."""
    tags, other = Pseudonymizer("keyed", KEY), Pseudonymizer("keyed", PseudonymKey(4, b"K" * 32))
    assert tags.did(DID) == Pseudonymizer("keyed", KEY).did(DID)
    assert len({tags.did(DID), other.did(DID), tags.message(DID)}) == 3
    assert len(tags.did("x")) == 32
    assert "did" not in tags.did(DID)
    assert (tags.epoch, other.epoch) == (3, 4)


@pytest.mark.parametrize("mode", ["plain", "keyed"])
def test_peers_are_networks(mode: str) -> None:
    """An address appears as the keyed hash of its /24 or /48, whatever log.dids says."""
    tags = Pseudonymizer("plain" if mode == "plain" else "keyed", KEY)
    assert tags.peer("192.0.2.1") == tags.peer("192.0.2.255") == tags.peer("::ffff:192.0.2.7")
    assert tags.peer("192.0.2.1") != tags.peer("192.0.3.1")
    assert tags.peer("2001:db8:1::1") == tags.peer("2001:db8:1:ffff::2")
    assert tags.peer("2001:db8:1::1") != tags.peer("2001:db8:2::1")
    assert tags.peer("fe80::1%eth0") == tags.peer("fe80::2")
    assert tags.peer("192.0.2.1") != Pseudonymizer("plain", PseudonymKey(3, b"K" * 32)).peer("192.0.2.1")
    assert tags.peer("/run/socket") is None


@given(st.text())
def test_any_text_has_a_pseudonym(text: str) -> None:
    """Any text has a pseudonym of at most 80 characters in both modes, lone surrogates included."""
    assert len(Pseudonymizer("plain", KEY).did(text)) <= 80
    assert len(Pseudonymizer("keyed", KEY).did(text)) == 32


def test_repr_hides_key() -> None:
    """The key is in no representation."""
    assert "kkkk" not in repr(KEY)


def test_key_file(tmp_path: Path) -> None:
    """log.key is created if missing, for its owner only, and stays the same."""
    path = tmp_path / "log.key"
    key = load_pseudonym_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_pseudonym_key(path) == key
    with pytest.raises(SecretFileError, match="already exists"):
        create_pseudonym_key(path)
    assert [file.name for file in tmp_path.iterdir()] == ["log.key"]


@pytest.mark.parametrize("text", ["", "[]", '{"epoch": 1}', '{"epoch": 1, "key": "zz"}', '{"epoch": 1, "key": "00"}'])
def test_invalid_key_file(text: str, tmp_path: Path) -> None:
    """A file without a key is refused in one line that does not repeat its content."""
    path = tmp_path / "log.key"
    path.touch(0o600)
    path.write_text(text)
    with pytest.raises(SecretFileError, match="^[^\n]*: expected [^\n]*$"):
        load_pseudonym_key(path)


def test_readable_key_file(tmp_path: Path) -> None:
    """A key that others can read is refused; the message has the command that fixes it."""
    path = tmp_path / "log.key"
    create_pseudonym_key(path)
    path.chmod(0o640)
    with pytest.raises(SecretFileError, match=f"chmod 600 {path}"):
        load_pseudonym_key(path)


def test_non_finite_number() -> None:
    """A number that JSON cannot express is an error."""
    for value in (math.nan, math.inf):
        with pytest.raises(TypeError):
            validate_fields("msg.ack", {"latency_ms": value})


def _render_event_table() -> str:
    """All events and their fields as a reStructuredText list table."""
    rows = ["   * - event\n     - level\n     - fields\n     - meaning"]
    for name, event in EVENTS.items():
        fields = ", ".join(f"``{field}``" for field in event.fields)
        rows.append(f"   * - ``{name}``\n     - {event.level}\n     - {fields}\n     - {event.meaning}")
    return ".. list-table::\n   :header-rows: 1\n\n" + "\n".join(rows) + "\n"
