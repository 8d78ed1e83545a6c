"""Simulated traffic of a month and the incidents planted in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import cycle
from random import Random
from typing import Any

from analytics.sample.ground_truth import DAY_S, HOUR_S, Incident
from analytics.sample.simulation import (
    COMMON_FAULTS,
    FORWARD_TYPE,
    PEAK_ACTIVITY,
    RATE_LIMITED_CODES,
    REPLAYED_CODE,
    REQUEST_TYPES,
    UNTIMELY_CODE,
    Message,
    NodeSlot,
    RequestSimulator,
    Simulation,
    Socket,
    Wallet,
    ZipfSampler,
    get_activity,
    make_late_directory,
)

_FETCH_BATCH = 50
_PUSH_TIMEOUT_S = 60.0
# Share of pushes to dead sockets.
_DEAD_SOCKET_SHARE = 0.012
_WALLETS_PER_PHONE = 8
_PUSH_SERVICES = (("fcm",), ("apns",), ("web_push",), ("fcm", "apns"))
_WAKEUP_INTERVAL_S = 20.0
# Shares of requests to push services, and of wake-ups that the wallet responds to.
_DEAD_TOKEN_SHARE, _UNAVAILABLE_SHARE, _RESPONSE_SHARE = 0.02, 0.03, 0.8


class TrafficSimulator(RequestSimulator):
    """
    :ivar flow: factor on messages and visits.
    :ivar vanishing: whether the next queued message vanishes.
    """

    def __init__(
        self, world: Simulation, rng: Random | None = None, numbers: range | None = None, messages_per_day: int = 0
    ) -> None:
        super().__init__(world, rng or world.rng, numbers or range(world.spec.wallets))
        self._recipients = ZipfSampler(self.rng.sample(self.wallets, len(self.wallets)), self.rng)
        self._messages_per_day = messages_per_day or world.spec.messages_per_day
        self.flow = 1.0
        self.vanishing = False

    def begin(self) -> None:
        """Schedule the traffic of the month."""
        world = self.world
        self.begin_wallets()
        for number, fault in enumerate(COMMON_FAULTS):
            # So that none of these is new later.
            world.schedule(world.spec.begin + HOUR_S * (1 + number), self.log_refusal, fault)
        for slot in world.slots:
            for day in range(4 + slot.number % 2, world.spec.days, 11):
                world.schedule(world.spec.begin + day * DAY_S + 4 * HOUR_S + 300 * slot.number, self.restart, slot)

    def begin_wallets(self) -> None:
        """Schedule messages to the wallets, and their visits."""
        world = self.world
        for hour in range(world.spec.days * 24):
            world.schedule(world.spec.begin + hour * HOUR_S, self._hour)
        for wallet in self.wallets:
            if wallet.joined:
                world.schedule(wallet.joined, self._join, wallet)
            world.schedule(max(world.now, wallet.joined) + self.rng.random() * wallet.pace, self._visit, wallet)

    # --- sending --------------------------------------------------------------------------------------------------

    def _hour(self) -> None:
        spec, now = self.world.spec, self.world.now
        grown = (1 + spec.growth) ** ((now - spec.begin) / DAY_S)
        mean = self._messages_per_day / 24 * get_activity(now) * grown * self.flow
        for _ in range(max(0, round(self.rng.gauss(mean, mean**0.5)))):
            self.world.schedule(now + self.rng.random() * HOUR_S, self._send)

    def _send(self) -> None:
        chance = self.rng.random()
        for fault in COMMON_FAULTS:
            chance -= fault[4]
            if chance < 0:
                self.log_refusal(fault)
                return
        recipient = self._recipients.pick(self.world.now)
        self.deliver(recipient, self._sender(recipient))

    def _sender(self, recipient: Wallet) -> Wallet | None:
        """Pick a sender; most forwards are anonymous, every command is signed."""
        if recipient.proto == "didcomm" and self.rng.random() < 0.4:
            return None
        return self.pick_sender()

    def deliver(self, recipient: Wallet, sender: Wallet | None) -> Message:
        """Accept a message, and push it if the recipient has a socket."""
        world, node = self.world, self.pick_running_process()
        self._make_room(recipient)
        protocol = recipient.proto
        ttl = world.spec.ttl_s if protocol == "didcomm" else None
        size = min(900_000, int(self.sample_lognormal(1900, 0.9)))
        message = Message(
            self.make_message_id(), recipient, size, world.now, None if ttl is None else world.now + ttl
        )
        world.enqueue(message)
        socket = recipient.socket
        if socket is not None:
            self._push(message, socket)
        node_of = world.slots[node]
        self.log_event(
            node_of,
            "msg.accept",
            msg=message.message_id,
            req=f"{self.get_process(node_of).requests + 1:x}",
            sender=sender.did if sender else None,
            rcpt=recipient.did,
            proto=protocol,
            size=size,
            ttl_s=ttl,
            method="queue" if socket is None else "live",
        )
        kind, status = REQUEST_TYPES[recipient.request_proto]["send"], 202 if protocol == "didcomm" else 200
        self.log_request(node_of, recipient.request_proto, kind, status, size=size + 900, sender=sender)
        if self.vanishing and socket is None and ttl is not None:
            self.vanishing = False
            world.dequeue(message)
        if message.expires_at is not None:
            world.schedule(message.expires_at + self.rng.random() * 60, self._expire, message)
        return message

    def _make_room(self, recipient: Wallet) -> None:
        while len(recipient.waiting) >= self.world.spec.queue_max_messages:
            self._lose("msg.evict", next(iter(recipient.waiting.values())), "fifo_count")

    def _expire(self, message: Message) -> None:
        if message.message_id in message.recipient.waiting:
            self._lose("msg.expire", message, "ttl")

    def _lose(self, event: str, message: Message, reason: str) -> None:
        """Log the loss of a message, always on the first running node."""
        self.world.dequeue(message)
        self.log_event(
            self.world.get_running_slots()[0],
            event,
            msg=message.message_id,
            rcpt=message.recipient.did,
            proto=message.recipient.proto,
            size=message.size,
            age_ms=int((self.world.now - message.accepted_at) * 1000),
            reason=reason,
            pushes=message.pushes,
        )

    # --- live delivery --------------------------------------------------------------------------------------------

    def _push(self, message: Message, socket: Socket) -> None:
        message.pushes += 1
        slot = self.world.slots[socket.slot]
        self._pushed(message, slot, "live", socket.name, self.sample_lognormal(4, 0.8) * slot.slowness)
        socket.pending[message.message_id] = message
        socket.traffic[1] += 1
        socket.traffic[3] += message.size + 700
        if self.rng.random() < _DEAD_SOCKET_SHARE:
            self.world.schedule(self.world.now + _PUSH_TIMEOUT_S, self.close, socket, 1006, "peer")
        else:
            delay = min(50.0, self.sample_lognormal(0.18, 1.1) * slot.slowness)
            self.world.schedule(self.world.now + delay, self._acknowledge_live, message, socket)

    def _acknowledge_live(self, message: Message, socket: Socket) -> None:
        if (
            socket.pending.pop(message.message_id, None) is not None
            and message.message_id in message.recipient.waiting
        ):
            self._acknowledge([message], socket.slot, "live", socket)

    def _pushed(
        self, message: Message, slot: NodeSlot, path: str, conn: str | None, after_ms: float, ok: bool = True
    ) -> None:
        self.log_event(
            slot,
            "msg.push",
            msg=message.message_id,
            rcpt=message.recipient.did,
            conn=conn,
            proto=message.recipient.proto,
            path=path,
            attempt=max(1, message.pushes),
            latency_ms=int((self.world.now - message.accepted_at) * 1000 + after_ms),
            ok=ok,
        )

    def _acknowledge(self, messages: Iterable[Message], slot: int, path: str, socket: Socket | None) -> None:
        at = self.world.slots[slot]
        wallet: Wallet | None = None
        for message in messages:
            if message.message_id in message.recipient.waiting:
                wallet = message.recipient
                self.world.dequeue(message)
                latency = int((self.world.now - message.accepted_at) * 1000)
                self.log_event(
                    at,
                    "msg.ack",
                    msg=message.message_id,
                    rcpt=wallet.did,
                    proto=wallet.proto,
                    path=path,
                    latency_ms=latency,
                )
        if wallet is not None:
            self._request(at, wallet, "acknowledge", 820, socket)

    # --- visits ---------------------------------------------------------------------------------------------------

    def _visit(self, wallet: Wallet) -> None:
        world, rng = self.world, self.rng
        world.schedule(world.now + rng.expovariate(1 / wallet.pace), self._visit, wallet)
        if (
            world.now < wallet.away
            or wallet.socket
            or rng.random() > get_activity(world.now) / PEAK_ACTIVITY * self.flow
        ):
            return
        slot = self.pick_running_process()
        if rng.random() < 0.75:
            self.connect(wallet, slot)
        else:
            self._fetch(wallet, slot, None)

    def connect(self, wallet: Wallet, number: int) -> None:
        """Open a socket and fetch queued messages."""
        world = self.world
        if wallet.socket is not None or world.slots[number].node is None:
            return
        socket = Socket(f"{self.rng.getrandbits(64):016x}", wallet, number, world.now)
        wallet.socket = socket
        slot = world.slots[number]
        slot.sockets[socket.name] = socket
        self.log_event(slot, "conn.open", conn=socket.name, transport="ws", peer=wallet.peer)
        self.log_event(slot, "conn.auth", conn=socket.name, did=wallet.did, proto=wallet.request_proto)
        self._request(slot, wallet, "connect", 760, socket)
        world.schedule(world.now + 0.05 + self.rng.random() * 0.2, self._fetch, wallet, number, socket)
        code, by = self.rng.choice(((1000, "peer"), (1001, "peer"), (1001, "peer"), (1006, "peer")))
        world.schedule(world.now + self.sample_lognormal(900, 1.1), self.close, socket, code, by)

    def close(self, socket: Socket, code: int, by: str) -> None:
        """Close a socket; unacknowledged pushes are queued again."""
        slot = self.world.slots[socket.slot]
        if slot.sockets.pop(socket.name, None) is None:
            return
        socket.wallet.socket = None
        self._fall_back(socket, slot)
        self.log_event(
            slot,
            "conn.close",
            conn=socket.name,
            proto=socket.wallet.request_proto,
            dur_ms=(self.world.now - socket.opened) * 1000,
            ws_code=code,
            reason=by,
            n_in=socket.traffic[0],
            n_out=socket.traffic[1],
            bytes_in=socket.traffic[2],
            bytes_out=socket.traffic[3],
        )

    def _fall_back(self, socket: Socket, slot: NodeSlot) -> None:
        if socket.wallet.proto == "didcomm":
            for message in socket.pending.values():
                if message.message_id in message.recipient.waiting:
                    self._pushed(message, slot, "live", socket.name, 0.0, ok=False)
        socket.pending.clear()

    def _fetch(self, wallet: Wallet, number: int, socket: Socket | None) -> None:
        """Fetch queued messages until there are none."""
        slot = self.world.slots[number]
        if slot.node is None or (socket is not None and socket.name not in slot.sockets):
            return
        pending = socket.pending if socket else {}
        batch = [message for message in wallet.waiting.values() if message.message_id not in pending][:_FETCH_BATCH]
        if wallet.proto == "didcomm":
            for message in batch:
                message.pushes += 1
                self._pushed(message, slot, "pickup", socket.name if socket else None, 0.0)
        self._request(slot, wallet, "fetch" if batch else "poll", 780, socket)
        if batch:
            self.world.schedule(
                self.world.now + self.sample_lognormal(0.9, 0.6), self._fetched, wallet, number, socket, batch
            )

    def _fetched(self, wallet: Wallet, number: int, socket: Socket | None, batch: Sequence[Message]) -> None:
        slot = self.world.slots[number]
        if slot.node is None or (socket is not None and socket.name not in slot.sockets):
            return
        self._acknowledge(batch, number, "pickup" if wallet.proto == "didcomm" else "poll", socket)
        self._fetch(wallet, number, socket)

    def _join(self, wallet: Wallet) -> None:
        slot = self.world.slots[self.pick_running_process()]
        proto = wallet.request_proto
        self.log_event(slot, "acct.grant", did=wallet.did, proto=proto)
        self._request(slot, wallet, "enrol", 1500 if proto == "decentrl" else 700)
        if wallet.proto == "didcomm":
            self.log_event(slot, "acct.update", did=wallet.did, proto=proto, n_added=1, n_removed=0)
            self._request(slot, wallet, "register", 900)

    def _request(self, slot: NodeSlot, wallet: Wallet, action: str, size: int, socket: Socket | None = None) -> None:
        """Log a request of a wallet. :param action: a key of :data:`REQUEST_TYPES`."""
        proto = wallet.request_proto
        self.log_request(slot, proto, REQUEST_TYPES[proto][action], 200, size=size, sender=wallet, socket=socket)

    # --- processes ------------------------------------------------------------------------------------------------

    def restart(self, slot: NodeSlot) -> None:
        """Restart normally: sockets are closed, wallets reconnect."""
        world = self.world
        if slot.node is None or len(world.get_running_slots()) == 1 < len(world.slots):
            return
        disconnected = [socket.wallet for socket in slot.sockets.values()]
        for socket in list(slot.sockets.values()):
            self.close(socket, 1001, "us")
        slot.node.stop()
        self._come_back(slot, disconnected, 8.0)

    def crash(self, slot: NodeSlot) -> None:
        """Crash: no socket is closed; another node requeues pushes a minute later."""
        if slot.node is None:
            return
        sockets = list(slot.sockets.values())
        slot.sockets.clear()
        slot.node.crash()
        self._come_back(slot, [socket.wallet for socket in sockets], 90.0)
        for socket in sockets:
            socket.wallet.socket = None
            self.world.schedule(self.world.now + _PUSH_TIMEOUT_S, self._swept, socket)

    def _swept(self, socket: Socket) -> None:
        self._fall_back(socket, self.world.get_running_slots()[0])

    def _come_back(self, slot: NodeSlot, disconnected: Sequence[Wallet], after: float) -> None:
        slot.node = None
        self.world.schedule(self.world.now + after, self.world.start, slot)
        for wallet in disconnected:
            self.world.schedule(self.world.now + self.rng.uniform(1, 40), self._reconnect, wallet)

    def _reconnect(self, wallet: Wallet) -> None:
        if self.world.now >= wallet.away:
            self.connect(wallet, self.pick_running_process())


class PhoneSimulator(TrafficSimulator):
    """
    Wallets on phones: without sockets, and woken by push notifications.

    Their random numbers are their own, so that other traffic does not depend on them.
    """

    def __init__(self, world: Simulation) -> None:
        spec = world.spec
        numbers = range(spec.wallets, spec.wallets + max(1, spec.wallets // _WALLETS_PER_PHONE))
        rng = Random(f"phones {spec.seed}")
        super().__init__(world, rng, numbers, max(1, spec.messages_per_day // _WALLETS_PER_PHONE))
        for wallet, services in zip(self.wallets, cycle(_PUSH_SERVICES), strict=False):
            wallet.services = services

    def deliver(self, recipient: Wallet, sender: Wallet | None) -> Message:
        """Accept a message, and wake the recipient."""
        message = super().deliver(recipient, sender)
        if self.world.now - recipient.woken >= _WAKEUP_INTERVAL_S:
            self._wake(recipient)
        return message

    def connect(self, wallet: Wallet, number: int) -> None:
        """Fetch queued messages."""
        self._fetch(wallet, number, None)

    def _wake(self, wallet: Wallet) -> None:
        """Send requests to all devices; the wallet responds if it can."""
        world, rng = self.world, self.rng
        wallet.woken = world.now
        for service in wallet.services:
            duration = min(9.0, self.sample_lognormal(0.12, 0.7))
            world.schedule(world.now + duration, self._log_wakeup, wallet, service, duration)
        if world.now >= wallet.away and rng.random() < _RESPONSE_SHARE:
            world.schedule(world.now + min(3000.0, self.sample_lognormal(4, 1.2)), self._respond, wallet)

    def _log_wakeup(self, wallet: Wallet, service: str, duration: float) -> None:
        slot, chance = self.world.slots[self.pick_running_process()], self.rng.random()
        about = {"did": wallet.did, "proto": wallet.proto, "service": service}
        outcome, code, status = "sent", None, 200
        if chance < _DEAD_TOKEN_SHARE:
            outcome, code, status = "gone", "UNREGISTERED", 404
        elif chance < _DEAD_TOKEN_SHARE + _UNAVAILABLE_SHARE:
            outcome, code, status = "retry", "UNAVAILABLE", 503
        answer = {"outcome": outcome, "code": code, "status": status, "age_ms": 0, "dur_ms": duration * 1000}
        self.log_event(slot, "push.wake", **about, **answer)
        if outcome == "gone":
            self.log_event(slot, "push.forget", **about, reason=code)

    def _respond(self, wallet: Wallet) -> None:
        self.connect(wallet, self.pick_running_process())


NEW_ERROR_CODE = "e.p.msg.routing-loop"
LOST_LINES = 20
DROPPED_LINES = 60
_ABUSE_REFUSALS = 480
_REPLAY_COUNT = 180
_SKEWED_REQUESTS = 90
_NEW_ERROR_COUNT = 45
_CLOCK_SKEW_MS = 437_000


def plant_incidents(traffic: TrafficSimulator) -> None:
    """Schedule all incidents of the specification."""
    world = traffic.world
    for name, begins in world.spec.list_incidents().items():
        world.schedule(begins, _start_incident, traffic, name)


def _start_incident(traffic: TrafficSimulator, name: str) -> None:
    world = traffic.world
    since = int(world.now - world.spec.begin)
    day = world.spec.first_day + timedelta(since // DAY_S)
    details = _INCIDENT_STARTERS[name](traffic)
    world.truth.incidents[name] = Incident(name, day, since % DAY_S // HOUR_S, details)


def _spread_calls(
    traffic: TrafficSimulator, count: int, seconds: float, use: Callable[..., None], *args: object
) -> None:
    """Schedule `count` calls within a period."""
    world = traffic.world
    for number in range(count):
        world.schedule(world.now + seconds * (number + world.rng.random()) / count, use, *args)


def _start_crash(traffic: TrafficSimulator) -> dict[str, Any]:
    """Lose some lines, then fail the power."""
    world = traffic.world
    slot = world.slots[1 % len(world.slots)]
    assert slot.node is not None
    world.schedule(world.now + 300, slot.node.lose_lines, LOST_LINES)
    world.schedule(world.now + 0.9 * HOUR_S, traffic.crash, slot)
    return {"node": slot.name, "boot": slot.node.boot, "missing": LOST_LINES, "damaged": 2}


def _start_vanished_message(traffic: TrafficSimulator) -> dict[str, Any]:
    """Lose one queued message without a line."""
    traffic.vanishing = True
    return {"overdue_from_day": timedelta(seconds=traffic.world.spec.ttl_s) + timedelta(hours=1)}


def _start_expiry_wave(traffic: TrafficSimulator) -> dict[str, Any]:
    """The wallets of one provider, a fifth of all, stay away for a day longer than messages live."""
    world = traffic.world
    provider = [wallet for wallet in traffic.wallets if wallet.proto == "didcomm"][::4]
    for wallet in provider:
        if wallet.away < world.now:
            wallet.away = world.now + world.spec.ttl_s + DAY_S
            if wallet.socket is not None:
                traffic.close(wallet.socket, 1006, "peer")
    return {"wallets": len(provider), "expires_after_s": world.spec.ttl_s}


def _start_eviction_storm(traffic: TrafficSimulator) -> dict[str, Any]:
    """A recipient that is offline for a day gets a third more than its queue holds within an hour."""
    world = traffic.world
    victim = next(one for one in traffic.wallets[20:] if one.proto == "didcomm" and one.away < world.now)
    if victim.socket is not None:
        traffic.close(victim.socket, 1000, "peer")
    victim.away = world.now + 1.5 * DAY_S
    count = world.spec.queue_max_messages * 4 // 3
    _spread_calls(traffic, count, HOUR_S, _deliver_message, traffic, victim)
    evicted = len(victim.waiting) + count - world.spec.queue_max_messages
    return {"rcpt": victim.did, "evicted_at_least": evicted, "waiting": world.spec.queue_max_messages}


def _deliver_message(traffic: TrafficSimulator, recipient: Wallet) -> None:
    traffic.deliver(recipient, None)


def _start_abuse_burst(traffic: TrafficSimulator) -> dict[str, Any]:
    """One network far exceeds its limit for ten minutes."""
    peer = traffic.tags.peer("203.0.113.7") or ""
    _spread_calls(traffic, _ABUSE_REFUSALS, 600, _refuse_by_limit, traffic, peer)
    return {"who": peer, "limit": "ip_per_minute", "hits": _ABUSE_REFUSALS}


def _refuse_by_limit(traffic: TrafficSimulator, peer: str) -> None:
    slot = traffic.world.slots[traffic.pick_running_process()]
    wait = traffic.rng.randrange(1, 60)
    traffic.log_event(slot, "limit.hit", who=peer, limit="ip_per_minute", retry_after_s=wait, peer=peer)
    traffic.log_request(slot, "didcomm", None, 429, size=2100, code=RATE_LIMITED_CODES["didcomm"], peer=peer)


def _start_replay_attack(traffic: TrafficSimulator) -> dict[str, Any]:
    """A recorded envelope is replayed to all nodes."""
    victim = next(one for one in traffic.wallets if one.proto == "didcomm")
    _spread_calls(traffic, _REPLAY_COUNT, 1800, _send_replay, traffic, victim)
    return {"sender": victim.did, "code": REPLAYED_CODE, "n": _REPLAY_COUNT}


def _send_replay(traffic: TrafficSimulator, victim: Wallet) -> None:
    slot = traffic.world.slots[traffic.pick_running_process()]
    peer = traffic.tags.peer("198.51.100.9")
    kind = "messagepickup/3.0/messages-received"
    traffic.log_event(slot, "replay.drop", sender=victim.did, code=REPLAYED_CODE)
    traffic.log_request(slot, "didcomm", kind, 200, size=900, code=REPLAYED_CODE, sender=victim, peer=peer)


def _start_clock_skew(traffic: TrafficSimulator) -> dict[str, Any]:
    """The clock of one wallet is over seven minutes slow, for ten hours."""
    wallet = next(one for one in traffic.wallets if one.proto == "decentrl")
    _spread_calls(traffic, _SKEWED_REQUESTS, 10 * HOUR_S, _send_untimely_request, traffic, wallet)
    return {"code": UNTIMELY_CODE, "n": _SKEWED_REQUESTS, "age_ms": _CLOCK_SKEW_MS}


def _send_untimely_request(traffic: TrafficSimulator, wallet: Wallet) -> None:
    slot = traffic.world.slots[traffic.pick_running_process()]
    age = _CLOCK_SKEW_MS + traffic.rng.randrange(-2000, 2000)
    traffic.log_event(slot, "replay.drop", code=UNTIMELY_CODE, age_ms=age)
    traffic.log_request(slot, "decentrl", "QUERY_PENDING_EVENTS", 401, size=780, code=UNTIMELY_CODE, peer=wallet.peer)


def _start_slow_node(traffic: TrafficSimulator) -> dict[str, Any]:
    """The last node takes five times as long for everything, all day."""
    slot = traffic.world.slots[-1]
    slot.slowness = 5.0
    traffic.world.schedule(traffic.world.now + DAY_S, _end_slow_node, traffic)
    return {"node": slot.name, "factor": 5.0}


def _end_slow_node(traffic: TrafficSimulator) -> None:
    traffic.world.slots[-1].slowness = 1.0


def _start_new_error(traffic: TrafficSimulator) -> dict[str, Any]:
    """A refusal with an unknown code."""
    _spread_calls(traffic, _NEW_ERROR_COUNT, 3 * HOUR_S, _send_new_error, traffic)
    return {"code": NEW_ERROR_CODE, "n": _NEW_ERROR_COUNT}


def _send_new_error(traffic: TrafficSimulator) -> None:
    slot = traffic.world.slots[traffic.pick_running_process()]
    traffic.log_request(slot, "didcomm", FORWARD_TYPE, 400, size=2400, code=NEW_ERROR_CODE)


def _start_disk_full(traffic: TrafficSimulator) -> dict[str, Any]:
    """The first node's disk is full for a while; dropped lines are counted."""
    slot = traffic.world.slots[0]
    assert slot.node is not None
    slot.node.fill_disk(DROPPED_LINES)
    return {"node": slot.name, "boot": slot.node.boot, "dropped": DROPPED_LINES}


def _start_traffic_drop(traffic: TrafficSimulator) -> dict[str, Any]:
    """Traffic drops to 2 % for two hours."""
    traffic.flow = 0.02
    traffic.world.schedule(traffic.world.now + 2 * HOUR_S - 1, _end_traffic_drop, traffic)
    return {"hours": 2}


def _end_traffic_drop(traffic: TrafficSimulator) -> None:
    traffic.flow = 1.0


def _start_late_segment(traffic: TrafficSimulator) -> dict[str, Any]:
    """The next segment of the last node arrives days later."""
    world = traffic.world
    slot = world.slots[-1]
    slot.late = make_late_directory(world.truth.directory) / slot.name
    slot.late.mkdir(parents=True, exist_ok=True)
    return {"node": slot.name}


_INCIDENT_STARTERS: dict[str, Callable[[TrafficSimulator], dict[str, Any]]] = {
    "crash": _start_crash,
    "vanished_message": _start_vanished_message,
    "expiry_wave": _start_expiry_wave,
    "eviction_storm": _start_eviction_storm,
    "abuse_burst": _start_abuse_burst,
    "replay_attack": _start_replay_attack,
    "clock_skew": _start_clock_skew,
    "slow_node": _start_slow_node,
    "new_error": _start_new_error,
    "disk_full": _start_disk_full,
    "traffic_drop": _start_traffic_drop,
    "late_segment": _start_late_segment,
}
