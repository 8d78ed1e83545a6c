"""What a run of the benchmark measures: its parameters, its scenarios, and the settings of its daemons."""

from __future__ import annotations

from dataclasses import dataclass, field

# Modules and functions. Modules are imported when a scenario runs: some need packages that the others do not.
DEFAULT_SCENARIOS = {
    "opening": "envelope_scenario:measure_envelopes",
    "forward": "didcomm_scenarios:measure_forwards",
    "latency": "didcomm_scenarios:measure_latency",
    "cycle": "didcomm_scenarios:measure_cycle",
    "drain": "didcomm_scenarios:measure_drain",
    "storm": "didcomm_scenarios:measure_connection_storm",
    "mixed": "didcomm_scenarios:measure_mixed",
    "command": "decentrl_scenarios:measure_commands",
    "log": "storage_and_log_scenarios:measure_event_log",
    "push": "didcomm_scenarios:measure_push",
    "sockets": "memory_scenarios:measure_sockets",
    "memory": "memory_scenarios:measure_memory",
}
# Run on request only: they take minutes, many cores or much disk, or change with a release only.
OPTIONAL_SCENARIOS = {
    "workers": "didcomm_scenarios:measure_workers",
    "siblings": "didcomm_scenarios:measure_siblings",
    "accounts": "storage_and_log_scenarios:measure_accounts",
    "disk": "storage_and_log_scenarios:measure_disk",
    "soak": "memory_scenarios:measure_soak",
    "cost": "storage_and_log_scenarios:measure_cost",
    "pages": "decentrl_scenarios:measure_pages",
    "abuse": "flood_scenario:measure_abuse",
    "wake": "wake_scenario:measure_wakeups",
    "v1": "v1_scenario:measure_v1",
}
# Need a MongoDB replica set.
MONGODB_SCENARIOS = {
    "mongodb": "mongodb_scenarios:measure_mongodb",
    "nodes": "mongodb_scenarios:measure_nodes",
    "elsewhere": "mongodb_scenarios:measure_remote_push",
    "presence": "mongodb_scenarios:measure_presence",
}
SCENARIOS = DEFAULT_SCENARIOS | OPTIONAL_SCENARIOS | MONGODB_SCENARIOS
# Use standard protocols only, so that any mediator can be measured.
TARGET_SCENARIOS = ("forward", "latency", "cycle", "drain", "storm", "mixed")
# Affinidi's mediator stores equal messages once, and holds one socket per DID.
AFFINIDI_SCENARIOS = ("forward", "latency", "cycle")

# Distinct messages per size: more than fit in a cache that would make repetitions cheaper.
DISTINCT_MESSAGES = 300
RECIPIENTS = 100
# Duration of a warm-up relative to that of a round.
WARM_UP_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class BenchmarkPlan:
    """
    Parameters of a run.

    :param seconds: measuring time of a contender in a round.
    :param rounds: interleaved rounds; medians are reported. Many short rounds are steadier than few long ones.
    :param clients: concurrent keep-alive connections.
    :param sockets: idle WebSockets to hold open.
    :param messages: forwards over which memory has to stay flat.
    :param events: stored events of the large history, rounded down to thousands.
    :param sizes: bytes of the innermost plaintext, and of a command's payload.
    :param mongodb: URI of a replica set in which databases may be created and dropped.
    :param accounts: numbers of registered DIDs; the first one is the baseline.
    :param queued: queued messages, beside the first number of accounts.
    :param minutes: duration of the soak.
    :param even: open-loop requests are sent at fixed intervals instead of a Poisson process.
    :param target: URL of a running mediator to measure instead of a temporary daemon; empty for none.
    :param target_did: the target's DID, if it does not publish it.
    :param target_pid: the target's process on this machine; 0 if it is remote, its CPU time is unknown then.
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

    @property
    def warm_up_seconds(self) -> float:
        """Duration of a warm-up."""
        return self.seconds * WARM_UP_SHARE


_UNLIMITED = (
    "LIMITS__DID_PER_MINUTE", "LIMITS__IP_PER_MINUTE", "LIMITS__ACCOUNT_PER_MINUTE",
    "LIMITS__ACCOUNTS_PER_ADDRESS_PER_DAY", "LIMITS__REGISTRATION_BYTES_PER_ADDRESS_PER_DAY", "LIMITS__ACCOUNTS",
    "LIMITS__REGISTRATION_BYTES", "QUEUE__MAX_MESSAGES", "QUEUE__MAX_BYTES", "DECENTRL__MAX_PENDING_EVENTS",
    "DECENTRL__MAX_PENDING_BYTES", "DECENTRL__MAX_STORED_EVENTS", "DECENTRL__MAX_STORED_BYTES",
    "DIDCOMM_V1__CONNECTIONS_PER_MINUTE",
)  # fmt: skip
# Everything stays on, except limits that would reject this much load from one address.
DAEMON_SETTINGS = {
    "MEDIATORD_STORAGE__BACKEND": "sqlite",
    "MEDIATORD_LIMITS__MAX_CONNECTIONS_PER_IP": "1000000",
    **{f"MEDIATORD_{name}": str(10**12 if "BYTES" in name else 10**9) for name in _UNLIMITED},
}
