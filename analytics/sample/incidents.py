"""What goes wrong in the month, and what is to be found of it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from analytics.sample.front import FORWARD, RATE_LIMITED, REPLAYED, UNTIMELY
from analytics.sample.people import Wallet
from analytics.sample.spec import DAY, HOUR
from analytics.sample.traffic import Traffic
from analytics.sample.truth import Incident
from analytics.sample.world import late_directory

NEW_CODE = "e.p.msg.routing-loop"
LOST_LINES = 20
DROPPED_LINES = 60
_REFUSALS = 480
_REPLAYS = 180
_UNTIMELY = 90
_NEW_ERRORS = 45
_SKEW_MS = 437_000


def plant(traffic: Traffic) -> None:
    """Put all incidents of the declaration into the calendar."""
    world = traffic.world
    for name, begins in world.spec.planted().items():
        world.at(begins, _planted, traffic, name)


def _planted(traffic: Traffic, name: str) -> None:
    world = traffic.world
    since = int(world.now - world.spec.begin)
    day = world.spec.first_day + timedelta(since // DAY)
    details = _KINDS[name](traffic)
    world.truth.incidents[name] = Incident(name, day, since % DAY // HOUR, details)


def _later(traffic: Traffic, count: int, seconds: float, use: Callable[..., None], *args: object) -> None:
    """Call `use` so often within the time that follows."""
    world = traffic.world
    for number in range(count):
        world.at(world.now + seconds * (number + world.rng.random()) / count, use, *args)


def _crash(traffic: Traffic) -> dict[str, Any]:
    """Some lines are lost between others that are not; then the power fails."""
    world = traffic.world
    place = world.places[1 % len(world.places)]
    assert place.node is not None
    world.at(world.now + 300, place.node.lose, LOST_LINES)
    world.at(world.now + 0.9 * HOUR, traffic.crash, place)
    return {"node": place.name, "boot": place.node.boot, "missing": LOST_LINES, "damaged": 2}


def _vanished_message(traffic: Traffic) -> dict[str, Any]:
    """One message is kept and then gone, without a word."""
    traffic.vanishing = True
    return {"overdue_from_day": timedelta(seconds=traffic.world.spec.ttl_s) + timedelta(hours=1)}


def _expiry_wave(traffic: Traffic) -> dict[str, Any]:
    """All wallets of one provider, a fifth of all, stay away for a day longer than messages wait."""
    world = traffic.world
    provider = [wallet for wallet in traffic.wallets if wallet.proto == "didcomm"][::4]
    for wallet in provider:
        if wallet.away < world.now:
            wallet.away = world.now + world.spec.ttl_s + DAY
            if wallet.socket is not None:
                traffic.close(wallet.socket, 1006, "peer")
    return {"wallets": len(provider), "expires_after_s": world.spec.ttl_s}


def _eviction_storm(traffic: Traffic) -> dict[str, Any]:
    """One recipient, offline for a day, gets a third more than its queue holds within an hour."""
    world = traffic.world
    victim = next(one for one in traffic.wallets[20:] if one.proto == "didcomm" and one.away < world.now)
    if victim.socket is not None:
        traffic.close(victim.socket, 1000, "peer")
    victim.away = world.now + 1.5 * DAY
    count = world.spec.queue_max_messages * 4 // 3
    _later(traffic, count, HOUR, _deliver, traffic, victim)
    evicted = len(victim.waiting) + count - world.spec.queue_max_messages
    return {"rcpt": victim.did, "evicted_at_least": evicted, "waiting": world.spec.queue_max_messages}


def _deliver(traffic: Traffic, recipient: Wallet) -> None:
    traffic.deliver(recipient, None)


def _abuse_burst(traffic: Traffic) -> dict[str, Any]:
    """One network asks far more than it may, for ten minutes."""
    peer = traffic.tags.peer("203.0.113.7") or ""
    _later(traffic, _REFUSALS, 600, _limited, traffic, peer)
    return {"who": peer, "limit": "ip_per_minute", "hits": _REFUSALS}


def _limited(traffic: Traffic, peer: str) -> None:
    place = traffic.world.places[traffic.somewhere()]
    wait = traffic.rng.randrange(1, 60)
    traffic.emit(place, "limit.hit", who=peer, limit="ip_per_minute", retry_after_s=wait, peer=peer)
    traffic.request(place, "didcomm", None, 429, size=2100, code=RATE_LIMITED["didcomm"], peer=peer)


def _replay_attack(traffic: Traffic) -> dict[str, Any]:
    """Somebody has recorded an envelope, and sends it again and again to all nodes."""
    victim = next(one for one in traffic.wallets if one.proto == "didcomm")
    _later(traffic, _REPLAYS, 1800, _replayed, traffic, victim)
    return {"sender": victim.did, "code": REPLAYED, "n": _REPLAYS}


def _replayed(traffic: Traffic, victim: Wallet) -> None:
    place = traffic.world.places[traffic.somewhere()]
    peer = traffic.tags.peer("198.51.100.9")
    kind = "messagepickup/3.0/messages-received"
    traffic.emit(place, "replay.drop", sender=victim.did, code=REPLAYED)
    traffic.request(place, "didcomm", kind, 200, size=900, code=REPLAYED, sender=victim, peer=peer)


def _clock_skew(traffic: Traffic) -> dict[str, Any]:
    """The clock of one wallet is more than seven minutes slow, for ten hours."""
    wallet = next(one for one in traffic.wallets if one.proto == "decentrl")
    _later(traffic, _UNTIMELY, 10 * HOUR, _untimely, traffic, wallet)
    return {"code": UNTIMELY, "n": _UNTIMELY, "age_ms": _SKEW_MS}


def _untimely(traffic: Traffic, wallet: Wallet) -> None:
    place = traffic.world.places[traffic.somewhere()]
    age = _SKEW_MS + traffic.rng.randrange(-2000, 2000)
    traffic.emit(place, "replay.drop", code=UNTIMELY, age_ms=age)
    traffic.request(place, "decentrl", "QUERY_PENDING_EVENTS", 401, size=780, code=UNTIMELY, peer=wallet.peer)


def _slow_node(traffic: Traffic) -> dict[str, Any]:
    """The last node needs five times as long for everything, all day."""
    place = traffic.world.places[-1]
    place.slowness = 5.0
    traffic.world.at(traffic.world.now + DAY, _quick_again, traffic)
    return {"node": place.name, "factor": 5.0}


def _quick_again(traffic: Traffic) -> None:
    traffic.world.places[-1].slowness = 1.0


def _new_error(traffic: Traffic) -> dict[str, Any]:
    """A refusal that nobody has seen before."""
    _later(traffic, _NEW_ERRORS, 3 * HOUR, _faulty, traffic)
    return {"code": NEW_CODE, "n": _NEW_ERRORS}


def _faulty(traffic: Traffic) -> None:
    place = traffic.world.places[traffic.somewhere()]
    traffic.request(place, "didcomm", FORWARD, 400, size=2400, code=NEW_CODE)


def _disk_full(traffic: Traffic) -> dict[str, Any]:
    """The first node has nowhere to write for a while, and says so."""
    place = traffic.world.places[0]
    assert place.node is not None
    place.node.fill_disk(DROPPED_LINES)
    return {"node": place.name, "boot": place.node.boot, "dropped": DROPPED_LINES}


def _traffic_drop(traffic: Traffic) -> dict[str, Any]:
    """Hardly anything arrives for two hours."""
    traffic.flow = 0.02
    traffic.world.at(traffic.world.now + 2 * HOUR - 1, _flow_again, traffic)
    return {"hours": 2}


def _flow_again(traffic: Traffic) -> None:
    traffic.flow = 1.0


def _late_segment(traffic: Traffic) -> dict[str, Any]:
    """The segment that the last node begins next is copied to where it is analysed only days later."""
    world = traffic.world
    place = world.places[-1]
    place.late = late_directory(world.truth.directory) / place.name
    place.late.mkdir(parents=True, exist_ok=True)
    return {"node": place.name}


_KINDS: dict[str, Callable[[Traffic], dict[str, Any]]] = {
    "crash": _crash,
    "vanished_message": _vanished_message,
    "expiry_wave": _expiry_wave,
    "eviction_storm": _eviction_storm,
    "abuse_burst": _abuse_burst,
    "replay_attack": _replay_attack,
    "clock_skew": _clock_skew,
    "slow_node": _slow_node,
    "new_error": _new_error,
    "disk_full": _disk_full,
    "traffic_drop": _traffic_drop,
    "late_segment": _late_segment,
}
