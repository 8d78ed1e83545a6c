"""Opening envelopes: every opener in a process and an environment of its own, on the same envelopes with one key."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mediatord.bench.crowd import Crowd, forwards
from mediatord.bench.figures import Figures, Rounds, Table, Target, size_name, take_turns
from mediatord.bench.plan import DISTINCT_MESSAGES, RECIPIENTS
from mediatord.wallet.identity import Identity
from mediatord.wallet.mediator import Mediator
from tests.peers.comparing import OURS, TIMES, Company, Terms, compared, targets
from tests.peers.programs import NODE, AbsentError, Program, Running, running

RATE = "msg/CPU-s"
LONG = "mediatord, any message"
GOALS = {"jwcrypto": 3.3, "sicpa": 4.0, "indicio": 2.6, "didcomm-node": 9.0}
OPENERS = {
    OURS: Program("open_mediatord.py", arguments=("usual",)),
    LONG: Program("open_mediatord.py", arguments=("long",)),
    "jwcrypto": Program("open_jwcrypto.py"),
    "sicpa": Program("open_sicpa.py", ".venv-sicpa"),
    "indicio": Program("open_indicio.py", ".venv-indicio", ("authlib",)),
    "indicio, askar": Program("open_indicio.py", ".venv-indicio", ("askar",)),
    "didcomm-node": Program("open_didcomm_node.mjs", NODE),
}
_US = "us each"
# Turns are many and short: a neighbour then disturbs all alike.
_TURNS_PER_SECOND = 4
_WARM_UP_SECONDS = 0.5


def measure(terms: Terms) -> Table:
    """One table for all sizes; every figure is messages per second of the CPU time of the opener's process."""
    job = make_job(terms.sizes)
    company, rows, found = Company(), dict[str, Figures](), list[Target]()
    failures = []
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory(prefix="mediatord-peers-"))) / "job.json"
        place.write_text(json.dumps(job), "utf-8")
        openers = start(stack, terms, place, company)
        for size in map(size_name, terms.sizes):
            failures += disagreements(size, {name: opener.ask(f"check {size}") for name, opener in openers.items()})
            rounds = _one_size(openers, size, terms)
            rows |= compared(rounds, f"{size}  ", RATE)
            found += targets(rows, f"{size}  ", GOALS, "opened")
    notes = (
        "From the envelope as posted to `next` and the forwarded envelope as text; A256CBC-HS512, "
        f"{DISTINCT_MESSAGES} envelopes of {_lengths(job)} bytes.",
        *company.notes(),
    )
    return Table("Opening an envelope", (RATE, _US, TIMES), rows, tuple(found), notes, tuple(failures))


def make_job(sizes: tuple[int, ...], count: int = DISTINCT_MESSAGES) -> dict[str, Any]:
    """A mediator's key, and forwards to it from wallets whose DIDs are short."""
    identity = Identity.fresh(endpoint="http://127.0.0.1/didcomm")
    crowd = Crowd(Mediator.of(identity.document), tuple(Identity.fresh() for _ in range(RECIPIENTS)))
    key, public = identity.agreement, identity.agreement.private.public
    return {
        "key": {"did": identity.did, "kid": key.kid, "jwk": key.private.jwk(), "multikey": public.multibase()},
        "envelopes": {size_name(size): [one.decode() for one in forwards(crowd, size, count)] for size in sizes},
    }


def disagreements(size: str, opened: dict[str, Any]) -> list[str]:
    """A sentence for each contender that read something else than we did."""
    return [f"{name} reads {size} otherwise" for name, found in opened.items() if found != opened[OURS]]


def start(
    stack: ExitStack, terms: Terms, job: Path, company: Company, programs: Mapping[str, Program] = OPENERS
) -> dict[str, Running]:
    """
    Those openers that are asked for and can be run here, with their job in hand; the others are noted.

    :param job: as :func:`make_job` makes it, as JSON.
    """
    openers = {}
    for name, program in programs.items():
        if not (name.startswith(OURS) or terms.wants(name.partition(",")[0])):
            continue
        try:
            opener = stack.enter_context(running(program))
            opener.ask(str(job))
        except (AbsentError, RuntimeError) as error:
            company.skipped[name] = str(error)
            continue
        openers[name] = opener
        if name != LONG:
            company.versions[name] = opener.versions
    return openers


def _one_size(openers: dict[str, Running], size: str, terms: Terms) -> Rounds:
    seconds = 1 / _TURNS_PER_SECOND

    def contender(opener: Running) -> Callable[[], Figures]:
        opener.ask(f"run {size} {_WARM_UP_SECONDS}")
        return lambda: rate(opener.ask(f"run {size} {seconds}"))

    rounds = max(1, round(terms.rounds * terms.seconds * _TURNS_PER_SECOND))
    return take_turns({name: contender(opener) for name, opener in openers.items()}, rounds)


def rate(outcome: dict[str, float]) -> Figures:
    """What an opener says of a run, as figures."""
    per_second = outcome["opened"] / outcome["cpu_seconds"]
    return {RATE: per_second, _US: 1e6 / per_second}


def _lengths(job: dict[str, Any]) -> str:
    return " or ".join(f"{len(envelopes[0]):,}" for envelopes in job["envelopes"].values())
