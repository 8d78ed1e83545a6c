"""What a run is to measure, and for how long."""

from __future__ import annotations

from dataclasses import dataclass, field

DEFAULT_SCENARIOS = (
    "opening", "forward", "latency", "cycle", "drain", "storm", "mixed", "command", "log", "push", "sockets", "memory"
)  # fmt: skip
# Those that need a MongoDB replica set.
ON_MONGODB = ("mongodb", "nodes", "elsewhere", "presence")
# Those that speak standard protocols only, so that any mediator can be their subject.
ANYWHERE = ("forward", "latency", "cycle", "drain", "storm", "mixed")
# What takes minutes, many cores or much room, or changes with a release only, has to be asked for.
ASKED_FOR = ("workers", "accounts", "disk", "soak", "cost", "pages", "abuse")
SCENARIOS = (*DEFAULT_SCENARIOS, *ASKED_FOR, *ON_MONGODB)

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
    :param accounts: how many DIDs are registered, in turn; the first number is what the others are compared with.
    :param queued: messages that wait, beside so many accounts as the first number says.
    :param minutes: of the soak.
    :param even: requests at fixed times come in a beat, instead of at random.
    :param target: URL of a running mediator that is measured instead of a daemon of our own; empty for none.
    :param target_did: its DID, if it does not say so itself.
    :param target_pid: of its process, if it runs on this machine; 0 otherwise, and its CPU time is unknown.
    """

    seconds: float = 1.0
    rounds: int = 7
    clients: int = 128
    sockets: int = 1000
    messages: int = 100_000
    events: int = 1_000_000
    sizes: tuple[int, ...] = (1024, 16384)
    mongodb: str = field(default="", repr=False)
    accounts: tuple[int, ...] = (1_000, 100_000, 1_000_000)
    queued: int = 1_000_000
    minutes: float = 30.0
    even: bool = False
    target: str = ""
    target_did: str | None = None
    target_pid: int = 0


# Everything stays on; only what would refuse this much load from one address is out of the way.
DAEMON_SETTINGS = {
    "MEDIATORD_STORAGE__BACKEND": "sqlite",
    "MEDIATORD_LIMITS__DID_PER_MINUTE": "1000000000",
    "MEDIATORD_LIMITS__IP_PER_MINUTE": "1000000000",
    "MEDIATORD_LIMITS__ACCOUNT_PER_MINUTE": "1000000000",
    "MEDIATORD_LIMITS__MAX_CONNECTIONS_PER_IP": "1000000",
    "MEDIATORD_LIMITS__ACCOUNTS_PER_ADDRESS_PER_DAY": "1000000000",
    "MEDIATORD_LIMITS__REGISTRATION_BYTES_PER_ADDRESS_PER_DAY": "1000000000000",
    "MEDIATORD_LIMITS__ACCOUNTS": "1000000000",
    "MEDIATORD_LIMITS__REGISTRATION_BYTES": "1000000000000",
    "MEDIATORD_QUEUE__MAX_MESSAGES": "1000000000",
    "MEDIATORD_QUEUE__MAX_BYTES": "1000000000000",
    "MEDIATORD_DECENTRL__MAX_PENDING_EVENTS": "1000000000",
    "MEDIATORD_DECENTRL__MAX_PENDING_BYTES": "1000000000000",
    "MEDIATORD_DECENTRL__MAX_STORED_EVENTS": "1000000000",
    "MEDIATORD_DECENTRL__MAX_STORED_BYTES": "1000000000000",
}
