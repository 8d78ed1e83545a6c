"""Opening envelopes: every opener in a process and an environment of its own, on the same envelopes with one key."""

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
LONG = "mediatord, any message"
GOALS = {"jwcrypto": 3.3, "sicpa": 4.0, "indicio": 2.6, "didcomm-node": 9.0}
OPENERS = {
    OURS: DriverProgram("open_mediatord.py", arguments=("usual",)),
    LONG: DriverProgram("open_mediatord.py", arguments=("long",)),
    "jwcrypto": DriverProgram("open_jwcrypto.py"),
    "sicpa": DriverProgram("open_sicpa.py", ".venv-sicpa"),
    "indicio": DriverProgram("open_indicio.py", ".venv-indicio", ("authlib",)),
    "indicio, askar": DriverProgram("open_indicio.py", ".venv-indicio", ("askar",)),
    "didcomm-node": DriverProgram("open_didcomm_node.mjs", NODE),
}
_US = "us each"
# Turns are many and short: a neighbour then disturbs all alike.
_TURNS_PER_SECOND = 4
_WARM_UP_SECONDS = 0.5


def measure_envelopes(terms: ComparisonOptions) -> ResultTable:
    """One table for all sizes; every figure is messages per second of the CPU time of the opener's process."""
    job = make_job(terms.sizes)
    company, rows, found = Participants(), dict[str, Figures](), list[PerformanceTarget]()
    failures = []
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory(prefix="mediatord-peers-"))) / "job.json"
        place.write_text(json.dumps(job), "utf-8")
        openers = start_openers(stack, terms, place, company)
        for size in map(format_size, terms.sizes):
            failures += find_disagreements(
                size, {name: opener.ask(f"check {size}") for name, opener in openers.items()}
            )
            rounds = _one_size(openers, size, terms)
            rows |= compare_rows(rounds, f"{size}  ", RATE)
            found += select_targets(rows, f"{size}  ", GOALS, "opened")
    notes = (
        "From the envelope as posted to `next` and the forwarded envelope as text; A256CBC-HS512, "
        f"{DISTINCT_MESSAGES} envelopes of {_lengths(job)} bytes.",
        *company.notes(),
    )
    return ResultTable("Opening an envelope", (RATE, _US, TIMES), rows, found, list(notes), failures)


def make_job(sizes: tuple[int, ...], count: int = DISTINCT_MESSAGES) -> dict[str, Any]:
    """A mediator's key, and forwards to it from wallets whose DIDs are short."""
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
    """A sentence for each contender that read something else than we did."""
    return [f"{name} reads {size} otherwise" for name, found in opened.items() if found != opened[OURS]]


def start_openers(
    stack: ExitStack,
    terms: ComparisonOptions,
    job: Path,
    company: Participants,
    programs: Mapping[str, DriverProgram] = OPENERS,
) -> dict[str, RunningDriver]:
    """
    Those openers that are asked for and can be run here, with their job in hand; the others are noted.

    :param job: as :func:`make_job` makes it, as JSON.
    """
    openers = {}
    for name, program in programs.items():
        if not (name.startswith(OURS) or terms.wants(name.partition(",")[0])):
            continue
        try:
            opener = stack.enter_context(run_driver(program))
            opener.ask(str(job))
        except (DriverUnavailable, RuntimeError) as error:
            company.skipped[name] = str(error)
            continue
        openers[name] = opener
        if name != LONG:
            company.versions[name] = opener.versions
    return openers


def _one_size(openers: dict[str, RunningDriver], size: str, terms: ComparisonOptions) -> InterleavedResults:
    seconds = 1 / _TURNS_PER_SECOND

    def contender(opener: RunningDriver) -> Callable[[], Figures]:
        opener.ask(f"run {size} {_WARM_UP_SECONDS}")
        return lambda: read_rate(opener.ask(f"run {size} {seconds}"))

    rounds = max(1, round(terms.rounds * terms.seconds * _TURNS_PER_SECOND))
    return run_interleaved({name: contender(opener) for name, opener in openers.items()}, rounds)


def read_rate(outcome: dict[str, float]) -> Figures:
    """What an opener says of a run, as figures."""
    per_second = outcome["opened"] / outcome["cpu_seconds"]
    return {RATE: per_second, _US: 1e6 / per_second}


def _lengths(job: dict[str, Any]) -> str:
    return " or ".join(f"{len(envelopes[0]):,}" for envelopes in job["envelopes"].values())
