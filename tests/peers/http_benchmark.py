"""An empty POST answered with an empty 202: mediatord's listener, a stock `twisted.web` Site, and aiohttp."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from mediatord.bench.load_generator import TargetServer, post
from mediatord.bench.processes import CoreAssignment, assign_cores, pin_to_cores, read_line, spawn_module
from mediatord.bench.results import PER_CPU_SECOND, PER_SECOND, Figures, ResultTable, run_interleaved
from tests.peers.comparison import OURS, TIMES, ComparisonOptions, Participants, compare_rows, select_targets
from tests.peers.driver_processes import DriverProgram, DriverUnavailable, run_driver

SITE, AIOHTTP = "twisted", "aiohttp"
GOALS = {SITE: 4.0, AIOHTTP: 1.2}
SERVERS = ".venv-peers"

_COLUMNS = (PER_SECOND, PER_CPU_SECOND, "p50 ms", "p99 ms", TIMES)
_PATH = "/didcomm"
_WARM_UP_SECONDS = 0.5


def measure_http(options: ComparisonOptions) -> ResultTable:
    """One table; requests per CPU-second of the server process are compared."""
    participants, cores = Participants(), assign_cores()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="mediatord-peers-")))
        servers = {
            OURS: _program(
                stack, cores, DriverProgram("serve_mediatord.py", arguments=(str(directory),)), OURS, participants
            )
        }
        if options.wants(SITE):
            servers[SITE] = _site(stack, cores)
        if options.wants(AIOHTTP):
            try:
                program = DriverProgram("serve_aiohttp.py", SERVERS)
                servers[AIOHTTP] = _program(stack, cores, program, AIOHTTP, participants)
            except (DriverUnavailable, RuntimeError) as error:
                participants.skipped[AIOHTTP] = str(error)
        failures: list[str] = []
        contenders = {name: _contender(name, server, options, failures) for name, server in servers.items()}
        rows = compare_rows(run_interleaved(contenders, options.rounds), "", PER_CPU_SECOND)
    notes = (
        f"{options.clients} connections, keep-alive, five headers. {cores.note} Ours is the daemon's site without "
        "processing of messages; the stock Site is as in `mediatord bench`.",
        *participants.notes(),
    )
    targets = select_targets(rows, "", GOALS, "empty POSTs per CPU-second")
    return ResultTable("An empty POST, answered 202", _COLUMNS, rows, list(targets), list(notes), failures)


def _contender(
    name: str, server: TargetServer, options: ComparisonOptions, failures: list[str]
) -> Callable[[], Figures]:
    def run(seconds: float) -> Figures:
        load = post(server, [b""], options.clients, seconds)
        if set(load.statuses) != set(server.success):
            failures.append(f"{name} gave other answers than {server.success}: {dict(load.statuses)}")
        return load.figures()

    run(_WARM_UP_SECONDS)
    return lambda: run(options.seconds)


def _program(
    stack: ExitStack, cores: CoreAssignment, program: DriverProgram, name: str, participants: Participants
) -> TargetServer:
    with pin_to_cores(cores.server):
        server = stack.enter_context(run_driver(program))
    port = server.receive()["port"]
    participants.versions[name] = server.versions
    return TargetServer(f"http://127.0.0.1:{port}{_PATH}", server.pid)


def _site(stack: ExitStack, cores: CoreAssignment) -> TargetServer:
    with pin_to_cores(cores.server):
        process = stack.enter_context(spawn_module("mediatord.bench.baseline_servers", "empty"))
    return TargetServer(f"http://127.0.0.1:{read_line(process)}{_PATH}", process.pid)
