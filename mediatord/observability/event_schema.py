"""
Schema of the event log, version 1: all events and fields, validation, and encoding of lines (analytics contract).

The writer, the JSON Schema, the documentation and the readers' schema derive from :data:`EVENTS`. Fields that do not
apply are omitted; nothing is null. DIDs, message ids and addresses arrive as pseudonyms
(:mod:`mediatord.observability.pseudonyms`). There is no field for payloads, envelopes, keys or signatures.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal, Protocol

import orjson

SCHEMA_VERSION = 1

FieldType = Literal["string", "integer", "number", "boolean"]
LogLevel = Literal["debug", "info", "warn", "error"]
LOG_LEVELS: tuple[LogLevel, ...] = ("debug", "info", "warn", "error")

_PYTHON_TYPES: dict[FieldType, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (float, int),
    "boolean": (bool,),
}

ENVELOPE: dict[str, tuple[FieldType, str]] = {
    "v": ("integer", "version of this schema"),
    "ts": ("string", "RFC 3339, UTC, microseconds"),
    "seq": ("integer", "number of the line within its boot; a gap means lost lines"),
    "node": ("string", "configured name of the node"),
    "boot": ("string", "random id of this start"),
    "event": ("string", "name of the event"),
    "level": ("string", "debug, info, warn or error"),
    "epoch": ("integer", "epoch of the pseudonym key"),
}

# Every field name has one meaning in all events.
FIELDS: dict[str, tuple[FieldType, str]] = {
    "age_ms": ("integer", "milliseconds: age of the message or timestamp"),
    "all_accepted": ("integer", "messages that the store has ever accepted"),
    "all_acknowledged": ("integer", "of those, acknowledged, or accepted by an endpoint"),
    "all_evicted": ("integer", "of those, evicted from full queues"),
    "all_expired": ("integer", "of those, expired"),
    "all_removed": ("integer", "of those, removed by the operator"),
    "all_withdrawn": ("integer", "of those, withdrawn because their sender was rejected"),
    "attempt": ("integer", "number of this push of the message by the process, from 1"),
    "bytes": ("integer", "bytes of payload in all queues"),
    "bytes_in": ("integer", "bytes received on the connection"),
    "bytes_out": ("integer", "bytes sent on the connection"),
    "code": ("string", "problem or error code; absent on success"),
    "conn": ("string", "random id of a connection"),
    "connections": ("integer", "open sockets: conn.open less conn.close"),
    "conns": ("integer", "open sockets of this process"),
    "crypto_ms": ("number", "milliseconds: part of dur_ms spent on cryptography"),
    "delivered": ("integer", "since the start of the process: msg.ack"),
    "depth": ("integer", "messages in all queues"),
    "did": ("string", "pseudonym of an account or sender"),
    "difference": ("integer", "all_accepted less removed and queued messages; must be 0"),
    "dropped": ("integer", "lines that were not written"),
    "dur_ms": ("number", "milliseconds: duration"),
    "evicted": ("integer", "since the start of the process: msg.evict"),
    "expired": ("integer", "since the start of the process: msg.expire"),
    "fds": ("integer", "open file descriptors of this process"),
    "forwarded": ("integer", "since the start of the process: msg.accept"),
    "lag_ms": ("number", "milliseconds: largest timer delay of the reactor since the last gauge"),
    "latency_ms": ("number", "milliseconds since the message was accepted"),
    "limit": ("string", "which limit"),
    "lines": ("integer", "lines in the segment, this one included"),
    "method": ("string", "where an accepted message went: live, queue or http"),
    "msg": ("string", "pseudonym of the stored message's id"),
    "mtype": ("string", "DIDComm message type or Decentrl command"),
    "n_added": ("integer", "recipient DIDs added"),
    "n_in": ("integer", "messages received on the connection"),
    "n_out": ("integer", "messages sent on the connection"),
    "n_removed": ("integer", "recipient DIDs removed"),
    "ok": ("boolean", "whether the push succeeded; if not, the message stays queued"),
    "oldest_ms": ("integer", "milliseconds: age of the oldest message in all queues"),
    "outcome": ("string", "of a request to a push service: sent, gone, mismatch, rejected or retry"),
    "own_accepted": ("integer", "probe messages (which have no lines) accepted since the last ledger"),
    "own_acknowledged": ("integer", "probe messages acknowledged since the last ledger"),
    "own_evicted": ("integer", "probe messages evicted since the last ledger"),
    "own_expired": ("integer", "probe messages expired since the last ledger"),
    "path": ("string", "how it was delivered: live, pickup, poll or http"),
    "peer": ("string", "keyed hash of the network of the address: /24 or /48"),
    "proto": ("string", "didcomm, didcomm_v1 (requests, connections and accounts of it) or decentrl"),
    "pushes": ("integer", "pushes that were not acknowledged"),
    "rcpt": ("string", "pseudonym of the recipient DID"),
    "rcpts": ("integer", "recipients with queued messages"),
    "reason": ("string", "reason, as a constant word"),
    "req": ("string", "id of a request, as in the reply"),
    "requests_accepted": ("integer", "since the start of the process: req.done without code, status below 500"),
    "requests_failed": ("integer", "since the start of the process: req.done with status 500 or more"),
    "requests_rejected": ("integer", "since the start of the process: req.done with code, status below 500"),
    "retry_after_s": ("integer", "seconds until a retry can succeed"),
    "rss": ("integer", "resident bytes of the process"),
    "schema": ("integer", "version of this schema"),
    "segment": ("string", "name of the file after closing, without suffix"),
    "sender": ("string", "pseudonym of the sender DID; absent when anonymous"),
    "seq_first": ("integer", "seq of the first line"),
    "seq_last": ("integer", "seq of the last line"),
    "service": ("string", "push service: fcm, apns, web_push or webhook"),
    "size": ("integer", "bytes of the payload or body"),
    "status": ("integer", "HTTP status"),
    "store": ("string", "identifies the database; the same on all nodes that share it"),
    "stored": ("integer", "since the start of the process: msg.accept by queue, and msg.push that is not ok"),
    "transport": ("string", "ws or http"),
    "ttl_s": ("integer", "seconds until the message expires"),
    "version": ("string", "of mediatord"),
    "waiting": ("integer", "queued messages, counted individually; absent if there are too many"),
    "who": ("string", "pseudonym of the limited DID or address"),
    "ws_code": ("integer", "close code of the WebSocket"),
}


@dataclass(frozen=True, slots=True)
class EventDeclaration:
    """
    Declaration of an event.

    :param fields: names of its possible fields, all in :data:`FIELDS`.
    """

    fields: tuple[str, ...]
    meaning: str
    level: LogLevel = "info"


_MESSAGE_FIELDS = ("msg", "rcpt", "proto", "size", "age_ms", "reason", "pushes")
# Outcomes in the message ledger of a store, besides the queued messages.
_LEDGER_ENTRIES = ("accepted", "acknowledged", "expired", "evicted", "removed", "withdrawn")
MESSAGE_COUNTERS = ("forwarded", "stored", "delivered", "expired", "evicted")
REQUEST_COUNTERS = ("requests_accepted", "requests_rejected", "requests_failed")
_ACCOUNT_FIELDS = ("did", "proto", "reason", "n_added", "n_removed")

EVENTS: dict[str, EventDeclaration] = {
    "log.open": EventDeclaration(("version", "schema", "segment"), "first line of a segment"),
    "log.close": EventDeclaration(("seq_first", "seq_last", "lines", "dropped"), "last line of a segment"),
    "log.drop": EventDeclaration(("dropped", "reason"), "lines before this one were lost", "warn"),
    "proc.start": EventDeclaration(("version", "reason", "dur_ms"), "the daemon has started"),
    "proc.stop": EventDeclaration(("version", "reason", "dur_ms"), "the daemon is stopping"),
    "proc.reload": EventDeclaration(("version", "reason", "dur_ms"), "the configuration was reloaded"),
    "conn.open": EventDeclaration(("conn", "transport", "peer"), "a connection was accepted"),
    "conn.auth": EventDeclaration(
        ("conn", "did", "proto", "code"), "authentication of a connection succeeded or failed"
    ),
    "conn.close": EventDeclaration(
        ("conn", "did", "proto", "dur_ms", "ws_code", "reason", "n_in", "n_out", "bytes_in", "bytes_out"),
        "a connection has ended",
    ),
    "req.done": EventDeclaration(
        ("req", "conn", "proto", "mtype", "status", "code", "size", "dur_ms", "crypto_ms", "sender", "peer"),
        "an HTTP request or WebSocket frame was answered",
    ),
    "msg.accept": EventDeclaration(
        ("msg", "req", "sender", "rcpt", "proto", "size", "ttl_s", "method"), "a message was accepted for a recipient"
    ),
    "msg.push": EventDeclaration(
        ("msg", "rcpt", "conn", "proto", "path", "attempt", "latency_ms", "ok"),
        "a push succeeded (not yet acknowledged) or failed",
    ),
    "msg.ack": EventDeclaration(
        ("msg", "rcpt", "proto", "path", "latency_ms"), "a message was acknowledged, and so delivered"
    ),
    "msg.expire": EventDeclaration(_MESSAGE_FIELDS, "a message expired", "warn"),
    "msg.evict": EventDeclaration(_MESSAGE_FIELDS, "a message was evicted from a full queue", "warn"),
    "msg.remove": EventDeclaration(_MESSAGE_FIELDS, "a message was removed by its owner or the operator"),
    "limit.hit": EventDeclaration(("who", "limit", "retry_after_s", "peer"), "a limit was exceeded", "warn"),
    "replay.drop": EventDeclaration(
        ("sender", "code", "age_ms"), "a repeated or outdated request was rejected", "warn"
    ),
    "acct.grant": EventDeclaration(_ACCOUNT_FIELDS, "mediation was granted, or an identity registered"),
    "acct.deny": EventDeclaration(_ACCOUNT_FIELDS, "mediation or a registration was denied", "warn"),
    "acct.expire": EventDeclaration(_ACCOUNT_FIELDS, "an account was removed for disuse"),
    "acct.update": EventDeclaration(_ACCOUNT_FIELDS, "recipient DIDs were added or removed"),
    "push.wake": EventDeclaration(
        ("did", "proto", "service", "outcome", "code", "status", "age_ms", "dur_ms", "retry_after_s"),
        "a push service was asked to wake a device of an account",
    ),
    "push.forget": EventDeclaration(
        ("did", "proto", "service", "reason"), "a device was removed, as its push service does not know it"
    ),
    "gauge": EventDeclaration(
        ("depth", "bytes", "rcpts", "oldest_ms", "conns", "rss", "fds", "lag_ms"), "gauges, once a minute"
    ),
    "ledger": EventDeclaration(
        (
            "proto",
            "store",
            *(f"all_{entry}" for entry in _LEDGER_ENTRIES),
            "waiting",
            "difference",
            *(f"own_{entry}" for entry in _LEDGER_ENTRIES[:4]),
        ),
        "message ledger of one protocol: at start, once a minute, and at stop",
    ),
    "counters": EventDeclaration(
        (*MESSAGE_COUNTERS, *REQUEST_COUNTERS, "connections"),
        "Prometheus counters: once a minute, before each log.close, and at stop",
    ),
}

_FIELD_TYPES: dict[str, dict[str, tuple[type, ...]]] = {
    name: {field: _PYTHON_TYPES[FIELDS[field][0]] for field in event.fields} for name, event in EVENTS.items()
}


class EventLog(Protocol):
    """Receiver of events."""

    def emit(self, event: str, **fields: object) -> None:
        """
        Write an event; fields that are None are omitted.

        :raise TypeError: an undeclared event or field, or a value of a wrong type: a programming error.
        """

    def write(self, event: str, fields: dict[str, object]) -> None:
        """
        As :meth:`emit` without validation, for events of every message.

        :param fields: as declared, none of them None, milliseconds rounded by :func:`round_milliseconds`.
        """

    def flush(self) -> None:
        """Write pending lines to the file now, before clients are answered."""


def validate_fields(event: str, fields: Mapping[str, object]) -> dict[str, object]:
    """
    `fields` without None values, floats rounded.

    :raise TypeError: as :meth:`EventLog.emit`.
    """
    types = _FIELD_TYPES.get(event)
    if types is None:
        raise TypeError(f"{event} is not a declared event")
    valid: dict[str, object] = {}
    for name, value in fields.items():
        if name not in types:
            raise TypeError(f"{event} has no field {name}")
        if value is None:
            continue
        if type(value) not in types[name]:
            raise TypeError(f"{event}.{name} is a {type(value).__name__}")
        valid[name] = round_milliseconds(value) if isinstance(value, float) else value
    return valid


def round_milliseconds(value: float) -> float:
    """
    Round to microseconds, to keep lines short.

    :raise TypeError: infinite, or not a number.
    """
    if not isfinite(value):
        raise TypeError("a number that JSON cannot express")
    return round(value, 3)


def build_json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of one line of the log."""
    shared = {name: {"type": kind, "description": meaning} for name, (kind, meaning) in ENVELOPE.items()}
    lines = []
    for name, event in EVENTS.items():
        own = {field: {"type": FIELDS[field][0], "description": FIELDS[field][1]} for field in event.fields}
        properties = {**shared, "event": {"const": name}, **own}
        lines.append({"title": name, "description": event.meaning, "properties": properties, "type": "object"})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "mediatord log line",
        "required": list(ENVELOPE),
        "oneOf": [{**line, "additionalProperties": False} for line in lines],
    }


def render_json_schema() -> str:
    """The JSON Schema as text."""
    return json.dumps(build_json_schema(), indent=1) + "\n"


MAX_LINE_BYTES = 4096


def encode_line_head(event: str, level: LogLevel, *, node: str, boot: str, epoch: int) -> bytes:
    """Constant beginning of the lines of an event, with `%` placeholders for time and sequence number."""
    fixed = {"node": node, "boot": boot, "event": event, "level": level, "epoch": epoch}
    tail = json.dumps(fixed, separators=(",", ":"))[1:-1].replace("%", "%%")
    return b'{"v":%d,"ts":"%%b","seq":%%d,%b' % (SCHEMA_VERSION, tail.encode())


def encode_line(head: bytes, fields: Mapping[str, object]) -> bytes:
    """A line of at most 4096 ASCII bytes; long texts are truncated."""
    if not fields:
        return head + b"}\n"
    try:
        whole = b"%b,%b" % (head, orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)[1:])
        if len(whole) <= MAX_LINE_BYTES and whole.isascii():
            return whole
    except orjson.JSONEncodeError:  # a lone surrogate, or an integer beyond 64 bits
        pass
    return _encode_truncated_line(head, fields)


def _encode_truncated_line(head: bytes, fields: Mapping[str, object]) -> bytes:
    """As :func:`encode_line`, truncating texts until the line is short enough."""
    whole = b""
    for longest in (1000, 200, 20):
        cut = {
            name: value.encode("utf-8", "replace").decode()[:longest] if isinstance(value, str) else value
            for name, value in fields.items()
        }
        whole = head + b"," + json.dumps(cut, separators=(",", ":")).encode()[1:] + b"\n"
        if len(whole) <= MAX_LINE_BYTES:
            break
    return whole


if __name__ == "__main__":
    sys.stdout.write(render_json_schema())
