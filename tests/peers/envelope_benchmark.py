"""Opening envelopes: each opener in its own process and environment, with the same envelopes and key."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mediatord.bench.plan import DISTINCT_MESSAGES, RECIPIENTS
from mediatord.bench.results import (
    Figures,
    InterleavedResults,
    PerformanceTarget,
    ResultTable,
    format_size,
    run_interleaved,
)
from mediatord.bench.wallet_group import WalletGroup
from mediatord.wallet.didcomm_client import DIDCommMediator
from mediatord.wallet.didcomm_identity import WalletIdentity
from tests.peers.comparison import OURS, TIMES, ComparisonOptions, Participants, compare_rows, select_targets
from tests.peers.driver_processes import NODE, DriverProgram, DriverUnavailable, RunningDriver, run_driver

RATE = "msg/CPU-s"
GENERAL_PATH = "mediatord, any message"
GOALS = {"jwcrypto": 3.3, "sicpa": 4.0, "indicio": 2.6, "didcomm-node": 9.0}
OPENERS = {
    OURS: DriverProgram("open_mediatord.py", arguments=("fast",)),
    GENERAL_PATH: DriverProgram("open_mediatord.py", arguments=("general",)),
    "jwcrypto": DriverProgram("open_jwcrypto.py"),
    "sicpa": DriverProgram("open_sicpa.py", ".venv-sicpa"),
    "indicio": DriverProgram("open_indicio.py", ".venv-indicio", ("authlib",)),
    "indicio, askar": DriverProgram("open_indicio.py", ".venv-indicio", ("askar",)),
    "didcomm-node": DriverProgram("open_didcomm_node.mjs", NODE),
}
_US = "us each"
# Many short turns, so that disturbances affect all contenders alike.
_TURNS_PER_SECOND = 4
_WARM_UP_SECONDS = 0.5


def measure_envelopes(options: ComparisonOptions) -> ResultTable:
    """One table for all sizes; figures are messages per second of CPU time of the opener's process."""
    job = make_job(options.sizes)
    participants, rows, targets = Participants(), dict[str, Figures](), list[PerformanceTarget]()
    failures = []
    with ExitStack() as stack:
        job_file = Path(stack.enter_context(TemporaryDirectory(prefix="mediatord-peers-"))) / "job.json"
        job_file.write_text(json.dumps(job), "utf-8")
        openers = start_openers(stack, options, job_file, participants)
        for size in map(format_size, options.sizes):
            failures += find_disagreements(
                size, {name: opener.request(f"check {size}") for name, opener in openers.items()}
            )
            rounds = _one_size(openers, size, options)
            rows |= compare_rows(rounds, f"{size}  ", RATE)
            targets += select_targets(rows, f"{size}  ", GOALS, "opened")
    notes = (
        "From the envelope as posted to `next` and the forwarded envelope as text; A256CBC-HS512, "
        f"{DISTINCT_MESSAGES} envelopes of {_lengths(job)} bytes.",
        *participants.notes(),
    )
    return ResultTable("Opening an envelope", (RATE, _US, TIMES), rows, targets, list(notes), failures)


def make_job(sizes: tuple[int, ...], count: int = DISTINCT_MESSAGES) -> dict[str, Any]:
    """A mediator's key, and forwards to it from wallets with short DIDs."""
    identity = WalletIdentity.generate(endpoint="http://127.0.0.1/didcomm")
    group = WalletGroup.generate(DIDCommMediator.from_document(identity.document), RECIPIENTS)
    key, public = identity.agreement, identity.agreement.private.public
    return {
        "key": {"did": identity.did, "kid": key.kid, "jwk": key.private.jwk(), "multikey": public.multibase()},
        "envelopes": {
            format_size(size): [body.decode() for body, _ in group.forwards(size, count)] for size in sizes
        },
    }


def find_disagreements(size: str, opened: dict[str, Any]) -> list[str]:
    """A sentence for each contender whose result differs from mediatord's."""
    return [f"{name} reads {size} otherwise" for name, pairs in opened.items() if pairs != opened[OURS]]


def start_openers(
    stack: ExitStack,
    options: ComparisonOptions,
    job: Path,
    participants: Participants,
    programs: Mapping[str, DriverProgram] = OPENERS,
) -> dict[str, RunningDriver]:
    """
    Openers that are requested and can run here, with the job loaded; the others are noted.

    :param job: file with the result of :func:`make_job` as JSON.
    """
    openers = {}
    for name, program in programs.items():
        if not (name.startswith(OURS) or options.wants(name.partition(",")[0])):
            continue
        try:
            opener = stack.enter_context(run_driver(program))
            opener.request(str(job))
        except (DriverUnavailable, RuntimeError) as error:
            participants.skipped[name] = str(error)
            continue
        openers[name] = opener
        if name != GENERAL_PATH:
            participants.versions[name] = opener.versions
    return openers


def _one_size(openers: dict[str, RunningDriver], size: str, options: ComparisonOptions) -> InterleavedResults:
    seconds = 1 / _TURNS_PER_SECOND

    def contender(opener: RunningDriver) -> Callable[[], Figures]:
        opener.request(f"run {size} {_WARM_UP_SECONDS}")
        return lambda: read_rate(opener.request(f"run {size} {seconds}"))

    rounds = max(1, round(options.rounds * options.seconds * _TURNS_PER_SECOND))
    return run_interleaved({name: contender(opener) for name, opener in openers.items()}, rounds)


def read_rate(outcome: dict[str, float]) -> Figures:
    """Figures of an opener's run."""
    per_second = outcome["opened"] / outcome["cpu_seconds"]
    return {RATE: per_second, _US: 1e6 / per_second}


def _lengths(job: dict[str, Any]) -> str:
    return " or ".join(f"{len(envelopes[0]):,}" for envelopes in job["envelopes"].values())
