"""What wallets do on an ordinary day, and the lines that the daemon writes about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from analytics.sample.front import FAULTS, FORWARD, PICKUP, Front
from analytics.sample.people import BUSIEST, Message, Socket, Wallet, Zipf, liveliness
from analytics.sample.spec import DAY, HOUR
from analytics.sample.world import Place, World

_BATCH = 50
_DELIVERED_TIMEOUT = 60.0
# Of pushes: the socket was dead already.
_UNNOTICED = 0.012


class Traffic(Front):
    """
    :ivar flow: factor on what is sent and on visits.
    :ivar vanishing: whether the next message that has to wait will be gone without a word.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._recipients = Zipf(self.rng.sample(self.wallets, len(self.wallets)), self.rng)
        self.flow = 1.0
        self.vanishing = False

    def begin(self) -> None:
        """Let the month begin."""
        world = self.world
        for hour in range(world.spec.days * 24):
            world.at(world.spec.begin + hour * HOUR, self._hour)
        for wallet in self.wallets:
            if wallet.joined:
                world.at(wallet.joined, self._join, wallet)
            world.at(max(world.now, wallet.joined) + self.rng.random() * wallet.pace, self._visit, wallet)
        for number, fault in enumerate(FAULTS):
            # None of these is new later in the month.
            world.at(world.spec.begin + HOUR * (1 + number), self.refuse, fault)
        for place in world.places:
            for day in range(4 + place.number % 2, world.spec.days, 11):
                world.at(world.spec.begin + day * DAY + 4 * HOUR + 300 * place.number, self.restart, place)

    # --- sending --------------------------------------------------------------------------------------------------

    def _hour(self) -> None:
        spec, now = self.world.spec, self.world.now
        grown = (1 + spec.growth) ** ((now - spec.begin) / DAY)
        mean = spec.messages_per_day / 24 * liveliness(now) * grown * self.flow
        for _ in range(max(0, round(self.rng.gauss(mean, mean**0.5)))):
            self.world.at(now + self.rng.random() * HOUR, self._send)

    def _send(self) -> None:
        chance = self.rng.random()
        for fault in FAULTS:
            chance -= fault[4]
            if chance < 0:
                self.refuse(fault)
                return
        recipient = self._recipients.pick(self.world.now)
        self.deliver(recipient, self._sender(recipient))

    def _sender(self, recipient: Wallet) -> Wallet | None:
        """Most forwards are anonymous; every command is signed."""
        if recipient.proto == "didcomm" and self.rng.random() < 0.4:
            return None
        return self.anybody()

    def deliver(self, recipient: Wallet, sender: Wallet | None) -> Message:
        """A message is accepted for somebody, and pushed if there is a socket."""
        world, node = self.world, self.somewhere()
        self._make_room(recipient)
        half = recipient.proto
        ttl = world.spec.ttl_s if half == "didcomm" else None
        size = min(900_000, int(self.spread(1900, 0.9)))
        message = Message(self.tag(), recipient, size, world.now, None if ttl is None else world.now + ttl)
        world.kept(message)
        socket = recipient.socket
        if socket is not None:
            self._push(message, socket)
        node_of = world.places[node]
        self.emit(
            node_of,
            "msg.accept",
            msg=message.tag,
            req=f"{self.writer(node_of).requests + 1:x}",
            sender=sender.did if sender else None,
            rcpt=recipient.did,
            proto=half,
            size=size,
            ttl_s=ttl,
            method="queue" if socket is None else "live",
        )
        kind, status = (FORWARD, 202) if half == "didcomm" else ("TWO_WAY_PRIVATE", 200)
        self.request(node_of, half, kind, status, size=size + 900, sender=sender)
        if self.vanishing and socket is None and ttl is not None:
            self.vanishing = False
            world.gone(message)
        if message.until is not None:
            world.at(message.until + self.rng.random() * 60, self._expire, message)
        return message

    def _make_room(self, recipient: Wallet) -> None:
        while len(recipient.waiting) >= self.world.spec.queue_max_messages:
            self._lose("msg.evict", next(iter(recipient.waiting.values())), "fifo_count")

    def _expire(self, message: Message) -> None:
        if message.tag in message.to.waiting:
            self._lose("msg.expire", message, "ttl")

    def _lose(self, event: str, message: Message, reason: str) -> None:
        """Housekeeping and deposits are of any node; here always of the first."""
        self.world.gone(message)
        self.emit(
            self.world.up()[0],
            event,
            msg=message.tag,
            rcpt=message.to.did,
            proto=message.to.proto,
            size=message.size,
            age_ms=int((self.world.now - message.at) * 1000),
            reason=reason,
            pushes=message.pushes,
        )

    # --- live delivery --------------------------------------------------------------------------------------------

    def _push(self, message: Message, socket: Socket) -> None:
        message.pushes += 1
        place = self.world.places[socket.place]
        self._pushed(message, place, "live", socket.name, self.spread(4, 0.8) * place.slowness)
        socket.pending[message.tag] = message
        socket.traffic[1] += 1
        socket.traffic[3] += message.size + 700
        if self.rng.random() < _UNNOTICED:
            self.world.at(self.world.now + _DELIVERED_TIMEOUT, self.close, socket, 1006, "peer")
        else:
            taken = min(50.0, self.spread(0.18, 1.1) * place.slowness)
            self.world.at(self.world.now + taken, self._acknowledge_live, message, socket)

    def _acknowledge_live(self, message: Message, socket: Socket) -> None:
        if socket.pending.pop(message.tag, None) is not None and message.tag in message.to.waiting:
            self._acknowledge([message], socket.place, "live", socket)

    def _pushed(
        self, message: Message, place: Place, path: str, conn: str | None, after_ms: float, ok: bool = True
    ) -> None:
        self.emit(
            place,
            "msg.push",
            msg=message.tag,
            rcpt=message.to.did,
            conn=conn,
            proto=message.to.proto,
            path=path,
            attempt=max(1, message.pushes),
            latency_ms=int((self.world.now - message.at) * 1000 + after_ms),
            ok=ok,
        )

    def _acknowledge(self, messages: Iterable[Message], place: int, path: str, socket: Socket | None) -> None:
        at = self.world.places[place]
        wallet: Wallet | None = None
        for message in messages:
            if message.tag in message.to.waiting:
                wallet = message.to
                self.world.gone(message)
                latency = int((self.world.now - message.at) * 1000)
                self.emit(
                    at, "msg.ack", msg=message.tag, rcpt=wallet.did, proto=wallet.proto, path=path, latency_ms=latency
                )
        if wallet is not None:
            kind = PICKUP + "messages-received" if wallet.proto == "didcomm" else "ACKNOWLEDGE_PENDING_EVENTS"
            self.request(at, wallet.proto, kind, 200, size=820, sender=wallet, socket=socket)

    # --- visits ---------------------------------------------------------------------------------------------------

    def _visit(self, wallet: Wallet) -> None:
        world, rng = self.world, self.rng
        world.at(world.now + rng.expovariate(1 / wallet.pace), self._visit, wallet)
        if world.now < wallet.away or wallet.socket or rng.random() > liveliness(world.now) / BUSIEST * self.flow:
            return
        place = self.somewhere()
        if rng.random() < 0.75:
            self.connect(wallet, place)
        else:
            self._fetch(wallet, place, None)

    def connect(self, wallet: Wallet, number: int) -> None:
        """A wallet opens a socket and fetches what waits."""
        world = self.world
        if wallet.socket is not None or world.places[number].node is None:
            return
        socket = Socket(f"{self.rng.getrandbits(64):016x}", wallet, number, world.now)
        wallet.socket = socket
        place = world.places[number]
        place.sockets[socket.name] = socket
        self.emit(place, "conn.open", conn=socket.name, transport="ws", peer=wallet.peer)
        self.emit(place, "conn.auth", conn=socket.name, did=wallet.did, proto=wallet.proto)
        kind = PICKUP + "live-delivery-change" if wallet.proto == "didcomm" else "AUTHENTICATE"
        self.request(place, wallet.proto, kind, 200, size=760, sender=wallet, socket=socket)
        world.at(world.now + 0.05 + self.rng.random() * 0.2, self._fetch, wallet, number, socket)
        code, by = self.rng.choice(((1000, "peer"), (1001, "peer"), (1001, "peer"), (1006, "peer")))
        world.at(world.now + self.spread(900, 1.1), self.close, socket, code, by)

    def close(self, socket: Socket, code: int, by: str) -> None:
        """A socket goes; what was pushed on it in vain waits again."""
        place = self.world.places[socket.place]
        if place.sockets.pop(socket.name, None) is None:
            return
        socket.wallet.socket = None
        self._fall_back(socket, place)
        self.emit(
            place,
            "conn.close",
            conn=socket.name,
            proto=socket.wallet.proto,
            dur_ms=(self.world.now - socket.opened) * 1000,
            ws_code=code,
            reason=by,
            n_in=socket.traffic[0],
            n_out=socket.traffic[1],
            bytes_in=socket.traffic[2],
            bytes_out=socket.traffic[3],
        )

    def _fall_back(self, socket: Socket, place: Place) -> None:
        if socket.wallet.proto == "didcomm":
            for message in socket.pending.values():
                if message.tag in message.to.waiting:
                    self._pushed(message, place, "live", socket.name, 0.0, ok=False)
        socket.pending.clear()

    def _fetch(self, wallet: Wallet, number: int, socket: Socket | None) -> None:
        """Ask for what waits, and come again until nothing does."""
        place = self.world.places[number]
        if place.node is None or (socket is not None and socket.name not in place.sockets):
            return
        pending = socket.pending if socket else {}
        batch = [message for message in wallet.waiting.values() if message.tag not in pending][:_BATCH]
        if wallet.proto == "decentrl":
            kind = "QUERY_PENDING_EVENTS"
        else:
            kind = PICKUP + ("delivery-request" if batch else "status-request")
            for message in batch:
                message.pushes += 1
                self._pushed(message, place, "pickup", socket.name if socket else None, 0.0)
        self.request(place, wallet.proto, kind, 200, size=780, sender=wallet, socket=socket)
        if batch:
            self.world.at(self.world.now + self.spread(0.9, 0.6), self._fetched, wallet, number, socket, batch)

    def _fetched(self, wallet: Wallet, number: int, socket: Socket | None, batch: Sequence[Message]) -> None:
        place = self.world.places[number]
        if place.node is None or (socket is not None and socket.name not in place.sockets):
            return
        self._acknowledge(batch, number, "pickup" if wallet.proto == "didcomm" else "poll", socket)
        self._fetch(wallet, number, socket)

    def _join(self, wallet: Wallet) -> None:
        place = self.world.places[self.somewhere()]
        if wallet.proto == "didcomm":
            kind = "coordinate-mediation/3.0/"
            self.emit(place, "acct.grant", did=wallet.did, proto="didcomm")
            self.request(place, "didcomm", kind + "mediate-request", 200, size=700, sender=wallet)
            self.emit(place, "acct.update", did=wallet.did, proto="didcomm", n_added=1, n_removed=0)
            self.request(place, "didcomm", kind + "recipient-update", 200, size=900, sender=wallet)
        else:
            self.emit(place, "acct.grant", did=wallet.did, proto="decentrl")
            self.request(place, "decentrl", "REQUEST_COMMUNICATION_CONTRACT", 200, size=1500, sender=wallet)

    # --- processes ------------------------------------------------------------------------------------------------

    def restart(self, place: Place) -> None:
        """An orderly restart: sockets are closed, wallets come back."""
        world = self.world
        if place.node is None or len(world.up()) == 1 < len(world.places):
            return
        homeless = [socket.wallet for socket in place.sockets.values()]
        for socket in list(place.sockets.values()):
            self.close(socket, 1001, "us")
        place.node.stop()
        self._come_back(place, homeless, 8.0)

    def crash(self, place: Place) -> None:
        """Nobody closes anything; another node finds what was on the sockets a minute later."""
        if place.node is None:
            return
        sockets = list(place.sockets.values())
        place.sockets.clear()
        place.node.crash()
        self._come_back(place, [socket.wallet for socket in sockets], 90.0)
        for socket in sockets:
            socket.wallet.socket = None
            self.world.at(self.world.now + _DELIVERED_TIMEOUT, self._swept, socket)

    def _swept(self, socket: Socket) -> None:
        self._fall_back(socket, self.world.up()[0])

    def _come_back(self, place: Place, homeless: Sequence[Wallet], after: float) -> None:
        place.node = None
        self.world.at(self.world.now + after, self.world.start, place)
        for wallet in homeless:
            self.world.at(self.world.now + self.rng.uniform(1, 40), self._reconnect, wallet)

    def _reconnect(self, wallet: Wallet) -> None:
        if self.world.now >= wallet.away:
            self.connect(wallet, self.somewhere())
