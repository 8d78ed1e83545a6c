"""The same for programs: `/admin/status.json`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mediatord.admin import ledger
from mediatord.admin.overview import AGES, Overview
from mediatord.protocol import jsontext


def status_json(overview: Overview, now: float | None = None) -> bytes:
    """
    An object; times are seconds since the epoch, spans seconds, and null is what nobody knows.

    :param now: when it is shown; by default as soon as it was made.
    """
    return jsontext.dumps(
        {
            "at": overview.at,
            "age_seconds": _age(overview.at, now),
            "version": overview.version,
            "node": overview.node,
            "ok": overview.well,
            "state": overview.state,
            "uptime_seconds": overview.uptime,
            "store": {
                "backend": overview.backend,
                "answers": overview.cohorts is not None,
                **_of_store(overview, now),
            },
            "processes": {"asked": overview.asked, "answered": [asdict(one) for one in overview.processes]},
            "gauges": dict(overview.gauges),
            "traffic": _traffic(overview),
            "ledger": ledger.as_json(overview.books) if overview.books else None,
            "waiting": _waiting(overview),
            "refusals": [asdict(one) for one in overview.refusals],
            "warnings": [asdict(one) for one in overview.warnings],
            "reports": None if overview.reports is None else [asdict(one) for one in overview.reports],
        }
    )


def _of_store(overview: Overview, now: float | None) -> dict[str, float | None]:
    """Of which time the ledger is, and what waits."""
    at = overview.store_at
    return {"at": at, "age_seconds": None if at is None else _age(at, now)}


def _age(at: float, now: float | None) -> float:
    return 0.0 if now is None else round(max(0.0, now - at), 3)


def _traffic(overview: Overview) -> dict[str, Any]:
    return {
        name: {
            "total": None if overview.totals is None else overview.totals[name],
            "last_minute": flow.minute,
            "last_hour": flow.hour,
            "by_minute": list(flow.by_minute),
        }
        for name, flow in overview.flows.items()
    }


def _waiting(overview: Overview) -> dict[str, Any] | None:
    if overview.waiting is None:
        return None
    messages, size = overview.waiting.messages, overview.waiting.bytes
    return {"messages": messages, "bytes": size, "by_age": _by_age(overview), "largest": _largest(overview)}


def _by_age(overview: Overview) -> list[dict[str, Any]]:
    bounds: list[int | None] = [*AGES, None]
    return [
        {"below_seconds": bound, **asdict(cohort)}
        for bound, cohort in zip(bounds, overview.cohorts or (), strict=True)
    ]


def _largest(overview: Overview) -> list[dict[str, Any]]:
    return [
        {
            "recipient": one.tag,
            "messages": one.messages,
            "bytes": one.bytes,
            "oldest_seconds": one.age,
            "self_test": one.own,
        }
        for one in overview.largest
    ]
