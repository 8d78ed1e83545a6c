"""An empty POST, answered with an empty 202: mediatord's listener, a stock `twisted.web` Site, and aiohttp."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from mediatord.bench.cores import Cores, on, split
from mediatord.bench.drive import PER_CPU_SECOND, PER_SECOND, Server, post_for
from mediatord.bench.figures import Figures, Table, take_turns
from mediatord.bench.load import write_bodies
from mediatord.bench.processes import child, read_line
from tests.peers.comparing import OURS, TIMES, Company, Terms, compared, targets
from tests.peers.programs import AbsentError, Program, running

SITE, AIOHTTP = "twisted", "aiohttp"
GOALS = {SITE: 4.0, AIOHTTP: 1.2}
SERVERS = ".venv-peers"

_COLUMNS = (PER_SECOND, PER_CPU_SECOND, "p50 ms", "p99 ms", TIMES)
_PATH = "/didcomm"
_WARM_UP_SECONDS = 0.5


def measure(terms: Terms) -> Table:
    """One table; requests per CPU-second of the server's process are compared."""
    company, cores = Company(), split()
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory(prefix="mediatord-peers-")))
        bodies = place / "bodies"
        write_bodies(bodies, [b""])
        servers = {
            OURS: _program(stack, cores, Program("serve_mediatord.py", arguments=(str(place),)), OURS, company)
        }
        if terms.wants(SITE):
            servers[SITE] = _site(stack, cores)
        if terms.wants(AIOHTTP):
            try:
                program = Program("serve_aiohttp.py", SERVERS)
                servers[AIOHTTP] = _program(stack, cores, program, AIOHTTP, company)
            except (AbsentError, RuntimeError) as error:
                company.skipped[AIOHTTP] = str(error)
        failures: list[str] = []
        contenders = {name: _contender(name, server, bodies, terms, failures) for name, server in servers.items()}
        rows = compared(take_turns(contenders, terms.rounds), "", PER_CPU_SECOND)
    notes = (
        f"{terms.clients} connections, keep-alive, five headers. {cores.note} Ours is the daemon's site with nothing "
        "behind it; the stock Site is as in `mediatord bench`.",
        *company.notes(),
    )
    found = targets(rows, "", GOALS, "empty POSTs per CPU-second")
    return Table("An empty POST, answered 202", _COLUMNS, rows, tuple(found), notes, tuple(failures))


def _contender(name: str, server: Server, bodies: Path, terms: Terms, failures: list[str]) -> Callable[[], Figures]:
    def post(seconds: float) -> Figures:
        load = post_for(server, bodies, terms.clients, seconds)
        if set(load.statuses) != {server.success}:
            failures.append(f"{name} gave other answers than {server.success}: {load.statuses}")
        return load.figures()

    post(_WARM_UP_SECONDS)
    return lambda: post(terms.seconds)


def _program(stack: ExitStack, cores: Cores, program: Program, name: str, company: Company) -> Server:
    with on(cores.server):
        server = stack.enter_context(running(program))
    port = server.hear()["port"]
    company.versions[name] = server.versions
    return Server(server.pid, port, _PATH)


def _site(stack: ExitStack, cores: Cores) -> Server:
    with on(cores.server):
        process = stack.enter_context(child("mediatord.bench.stock"))
    return Server(process.pid, int(read_line(process)), _PATH)
