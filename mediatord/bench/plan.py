"""What a run is to measure, and for how long."""

from __future__ import annotations

from dataclasses import dataclass, field

DEFAULT_SCENARIOS = ("opening", "forward", "command", "log", "push", "sockets", "memory")
# Those that need a MongoDB replica set.
ON_MONGODB = ("mongodb", "nodes", "elsewhere", "presence")
# What takes minutes, or changes with a release only, has to be asked for, too.
SCENARIOS = (*DEFAULT_SCENARIOS, "cost", "pages", *ON_MONGODB)

# Distinct messages per size: more than fit in any cache that could make the second one cheaper.
DISTINCT_MESSAGES = 300
RECIPIENTS = 100


@dataclass(frozen=True, slots=True)
class Plan:
    """
    :param seconds: each contender is measured for this long, in each round.
    :param rounds: contenders take turns this often; medians count. Many short rounds are steadier than few long ones.
    :param clients: keep-alive connections that post at the same time.
    :param sockets: idle WebSockets to hold open.
    :param messages: forwards over which memory has to stay flat.
    :param events: stored ones in the larger history of which pages are read, rounded down to thousands.
    :param sizes: bytes of the plaintext inside the innermost envelope, and of a command's payload.
    :param mongodb: URI of a replica set in which databases may be made and dropped.
    """

    seconds: float = 1.0
    rounds: int = 7
    clients: int = 32
    sockets: int = 1000
    messages: int = 100_000
    events: int = 1_000_000
    sizes: tuple[int, ...] = (1024, 16384)
    mongodb: str = field(default="", repr=False)


# Everything stays on; only what would refuse this much load from one address is out of the way.
DAEMON_SETTINGS = {
    "MEDIATORD_STORAGE__BACKEND": "sqlite",
    "MEDIATORD_LIMITS__DID_PER_MINUTE": "1000000000",
    "MEDIATORD_LIMITS__IP_PER_MINUTE": "1000000000",
    "MEDIATORD_LIMITS__ACCOUNT_PER_MINUTE": "1000000000",
    "MEDIATORD_LIMITS__MAX_CONNECTIONS_PER_IP": "1000000",
    "MEDIATORD_QUEUE__MAX_MESSAGES": "1000000000",
    "MEDIATORD_QUEUE__MAX_BYTES": "1000000000000",
    "MEDIATORD_DECENTRL__MAX_PENDING_EVENTS": "1000000000",
    "MEDIATORD_DECENTRL__MAX_PENDING_BYTES": "1000000000000",
    "MEDIATORD_DECENTRL__MAX_STORED_EVENTS": "1000000000",
    "MEDIATORD_DECENTRL__MAX_STORED_BYTES": "1000000000000",
}
