"""
One keep-alive connection on which somebody asks, waits for the answer, and asks again.

Decentrl identities that the daemon knows, and commands that they have signed.

The history of somebody who chats a lot, as one identity has its mediator keep it, and pages of it.

Every event has a peer, one of few kinds, and a topic that few events share. Half of them came from others: those are
stored unprocessed with one tag, and get all their tags when the application is done with them, as wallets do it.
Everything follows from the number of an event and repeats after a thousand, so that it is known how many there are of
what.

A public channel with a long past, and pages of it.

Decentrl events for somebody who is offline: verified, authorised, durable in SQLite, and only then answered.

Whether pages of a long history take longer to read than those of a short one.
"""

from __future__ import annotations

import json
import secrets
import socket
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from itertools import cycle, islice, product
from math import ceil
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import perf_counter
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode, urlsplit

import click

from mediatord.bench.load_generator import (
    PER_CPU_SECOND,
    PER_SECOND,
    TargetServer,
    encode_request,
    is_complete_response,
    post_each_once,
    write_bodies,
)
from mediatord.bench.mediator_under_test import DATABASE_FILE, StoredMessageCheck, count_stored_rows
from mediatord.bench.processes import read_line, spawn_module
from mediatord.bench.scenario import (
    DAEMON_SETTINGS,
    BenchmarkPlan,
    Contender,
    Figures,
    InterleavedResults,
    PerformanceTarget,
    ResultTable,
    compute_percentile,
    format_size,
    run_interleaved,
)
from mediatord.protocol import encoding
from mediatord.protocol.decentrl.commands import ChannelType
from mediatord.protocol.decentrl.crypto import sign_event
from mediatord.protocol.encoding import encode_base64
from mediatord.wallet import decentrl_messages
from mediatord.wallet.decentrl_client import DecentrlMediator, read_mediator_document
from mediatord.wallet.decentrl_messages import (
    PUBLIC_CHANNEL,
    ContractRequest,
    DecentrlIdentity,
    accept_contract,
    derive_public_key,
    propose_contract,
)
from mediatord.wallet.temporary_daemon import run_temporary_daemon

JSON_TYPE = "application/json"

_CLIENT_TIMEOUT_SECONDS = 120.0
# Servers close a connection on which nothing is said, but not so soon.
_IDLE_SECONDS = 10.0
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class JSONResponse:
    """:param seconds: from the first byte of the request being sent to the last one of this being received."""

    status: int
    seconds: float
    body: bytes = field(repr=False)

    def read(self) -> dict[str, Any]:
        """
        The JSON object that it is.

        :raise RuntimeError: a refusal.
        """
        value: dict[str, Any] = encoding.loads_object(self.body)
        if self.status != 200:
            raise RuntimeError(f"the daemon answered {self.status} {value.get('code', '')}")
        return value


class KeepAliveClient:
    """A connection to a daemon, made anew when it was idle for long; closed at the end of `with`."""

    def __init__(self, url: str) -> None:
        target = urlsplit(url)
        self._host = target.hostname or ""
        self._port = target.port or 80
        self._path = target.path or "/"
        self._socket = self._connect()
        self._used = perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._socket.close()

    def post(self, body: bytes) -> JSONResponse:
        """POST JSON to where the URL says."""
        return self._exchange(encode_request(self._port, self._path, body, JSON_TYPE))

    def get(self, path: str) -> JSONResponse:
        """GET something else."""
        headers = f"Host: 127.0.0.1:{self._port}\r\nUser-Agent: mediatord-bench\r\nAccept: */*"
        return self._exchange(f"GET {path} HTTP/1.1\r\n{headers}\r\n\r\n".encode("ascii"))

    def _connect(self) -> socket.socket:
        connection = socket.create_connection((self._host, self._port), timeout=_CLIENT_TIMEOUT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _exchange(self, request: bytes) -> JSONResponse:
        if perf_counter() - self._used > _IDLE_SECONDS:
            self._socket.close()
            self._socket = self._connect()
        begun = perf_counter()
        self._socket.sendall(request)
        response = b""
        while not is_complete_response(response):
            data = self._socket.recv(_READ_BYTES)
            if not data:
                raise ConnectionError("the server closed a connection")
            response += data
        self._used = perf_counter()
        head, _, body = response.partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head.lower():
            raise RuntimeError("an answer without a length")
        return JSONResponse(int(response[9:12]), self._used - begun, body)


_SENDERS = 8
_RECIPIENTS = 20
_SIGNER_TIMEOUT_SECONDS = 30


@dataclass(frozen=True, slots=True)
class CommandSigner:
    """An identity, and the mediator that it says things to."""

    identity: DecentrlIdentity
    mediator: DecentrlMediator

    @property
    def did(self) -> str:
        """The identity's."""
        return self.identity.did

    def command(
        self,
        payload: dict[str, Any] | str,
        recipient_did: str | None = None,
        channel: ChannelType = decentrl_messages.DIRECT_CHANNEL,
    ) -> bytes:
        """Signed now; to the mediator if no recipient is given."""
        to = recipient_did or self.mediator.did
        signed = decentrl_messages.compose_command(
            self.identity, channel, to, payload, timestamp_ms=int(_unix_time() * 1000)
        )
        return decentrl_messages.encode_command(signed)

    def registration(self) -> bytes:
        """The command that makes it a registered one."""
        return self.command(
            propose_contract(self.identity, self.mediator.did, _unix_time()).payload(self.mediator.prekey)
        )

    def permission(self, sender: DecentrlIdentity) -> bytes:
        """The command that saves a contract which `sender` proposed."""
        proposed = propose_contract(sender, self.did, _unix_time()).payload(derive_public_key(self.identity.prekey))
        request = ContractRequest.model_validate({**proposed, "id": "", "sender_did": sender.did})
        signed = accept_contract(request, self.identity, _unix_time()).signed
        return self.command({"type": "SAVE_COMMUNICATION_CONTRACT", "signed_communication_contract": signed})


@dataclass(frozen=True, slots=True)
class CommandSigners:
    """:param senders: each of them may write to each of the recipients."""

    mediator: DecentrlMediator
    senders: tuple[CommandSigner, ...]
    recipients: tuple[CommandSigner, ...]


def fetch_decentrl_mediator(url: str) -> DecentrlMediator:
    """The mediator that a daemon says it is."""
    with urllib.request.urlopen(f"{url}/.well-known/did.json", timeout=_SIGNER_TIMEOUT_SECONDS) as response:
        return read_mediator_document(json.load(response))


def register_signer(mediator: DecentrlMediator, line: KeepAliveClient, alias: str) -> CommandSigner:
    """
    Make an identity and register it.

    :raise RuntimeError: the daemon did not do as asked.
    """
    signer = CommandSigner(DecentrlIdentity.fresh(alias, mediator.did), mediator)
    line.post(signer.registration()).read()
    return signer


def register_signers(url: str) -> CommandSigners:
    """
    Make identities, register them, and give them contracts.

    :raise RuntimeError: the daemon did not do as asked.
    """
    mediator = fetch_decentrl_mediator(url)
    with KeepAliveClient(mediator.url) as line:
        senders = tuple(register_signer(mediator, line, f"sender {number}") for number in range(_SENDERS))
        recipients = tuple(register_signer(mediator, line, f"recipient {number}") for number in range(_RECIPIENTS))
        for recipient, sender in product(recipients, senders):
            line.post(recipient.permission(sender.identity)).read()
    return CommandSigners(mediator, senders, recipients)


def sign_private_commands(signers: CommandSigners, size: int, count: int) -> Iterator[bytes]:
    """
    TWO_WAY_PRIVATE commands of now, from everybody to everybody in turn.

    :param size: characters of the payload, which is base64 of nothing in particular.
    """
    for sender, recipient in islice(cycle(product(signers.senders, signers.recipients)), count):
        payload = encode_base64(secrets.token_bytes(size))[:size]
        yield sender.command(payload, recipient.did, decentrl_messages.PRIVATE_CHANNEL)


def _unix_time() -> float:
    return datetime.now(UTC).timestamp()


HISTORY_BATCH = 1000
PAGE_SIZE = 20
FIRST_SECOND = 1_700_000_000
SECONDS_APART = 30

EVENT_KINDS = 5
EVENTS_PER_TOPIC = 50
_PEERS = 20
# So many rounds of all peers: the even ones are sent, the odd ones received, of which the last stays unread.
_ROUNDS = 50
_PAYLOAD_BYTES = 225
# Those that are asked for. None of this kind stays unread, and any other topic has three with this peer.
_QUERIED_KIND, _QUERIED_PEER = 2, 3


@dataclass(frozen=True, slots=True)
class PageRequest:
    """
    Something to ask for.

    :param change: changes the list that it is a page of, without making it longer or shorter.
    :param total: how many events match.
    """

    ask: Callable[[], JSONResponse]
    change: Callable[[], None]
    total: int

    def read(self) -> float:
        """
        Ask for it; the seconds that it took.

        :raise RuntimeError: it is not what it has to be.
        """
        answer = self.ask()
        value = answer.read()
        page = value.get("payload", value)
        if (page["pagination"]["total"], len(page["events"])) != (self.total, min(PAGE_SIZE, self.total)):
            raise RuntimeError(f"a page of {len(page['events'])} out of {page['pagination']['total']} events")
        return answer.seconds


@dataclass(frozen=True, slots=True)
class PageRange:
    """Pages from `first` on, `count` of them, one of which is asked for."""

    first: int = 0
    count: int = 1

    def choose(self, random: Random) -> int:
        """One of them."""
        return self.first + random.randrange(self.count)


FIRST_PAGE = PageRange()
# No filter.
NO_FILTER: Mapping[str, Any] = {}


def page_ranges(events: int) -> dict[str, PageRange]:
    """Where to look in a list of so many events, by name; all pages are full."""
    pages = events // PAGE_SIZE
    return {
        "first page": FIRST_PAGE,
        "page in the middle": PageRange(pages // 2),
        "last page": PageRange(pages - 1),
        "any page": PageRange(0, pages),
    }


class StoredHistory:
    """The stored events of one identity; `line` leads to its mediator."""

    def __init__(self, signer: CommandSigner, line: KeepAliveClient) -> None:
        self._signer = signer
        self._line = line
        self._random = Random(1)
        self._changing: tuple[str, list[str]] | None = None
        self._peers = [DecentrlIdentity.fresh(f"peer {number}", signer.mediator.did).did for number in range(_PEERS)]
        # They are signatures, so that making one takes longer than all else of an event.
        self._tag = lru_cache(1000)(signer.identity.tag)

    def fill(self, count: int) -> Iterator[int]:
        """
        Store events from the first one on, a batch at a time; how many they were.

        :param count: a multiple of the batch.
        """
        for first in range(0, count, HISTORY_BATCH):
            numbers = range(first, first + HISTORY_BATCH)
            self._say({"type": "SAVE_EVENTS", "events": [self._event(number) for number in numbers]})
            self._process(numbers)
            yield HISTORY_BATCH

    def pages(self, count: int) -> dict[str, PageRequest]:
        """
        What there is to read of so many events, by name.

        :param count: a multiple of the batch.
        """
        middle = count // 2
        peer: dict[str, Any] = {"participant_did": self._peers[_QUERIED_PEER]}
        kind: dict[str, Any] = {"encrypted_tags": [self._tag(f"kind.{_QUERIED_KIND}")]}
        topic = {"encrypted_tags": [self._tag(f"topic.{middle // EVENTS_PER_TOPIC}")]}
        return {
            **{name: self._page(count, pages=pages) for name, pages in page_ranges(count).items()},
            "one tag": self._page(count // EVENT_KINDS, kind),
            "one participant": self._page(count // _PEERS, peer),
            "unprocessed": self._page(count // _ROUNDS, {"unprocessed_only": True}),
            "narrow time range": self._page(PAGE_SIZE, _time_range_filter(middle, PAGE_SIZE)),
            "rare tag and participant": self._page(3, topic | peer),
            "common tag and participant": self._page(count // EVENT_KINDS // _PEERS, kind | peer),
        }

    def change(self) -> None:
        """Turn the tags of one event round."""
        assert self._changing is not None
        event_id, tags = self._changing
        self._changing = event_id, tags[::-1]
        self._say({"type": "UPDATE_EVENT_TAGS", "events": [{"event_id": event_id, "encrypted_tags": tags[::-1]}]})

    def _say(self, payload: dict[str, Any]) -> dict[str, Any]:
        return self._line.post(self._signer.command(payload)).read()

    def _query(self, page: int, size: int, wanted: Mapping[str, Any]) -> bytes:
        pagination = {"page": page, "page_size": size}
        return self._signer.command({"type": "QUERY_EVENTS", "filter": {**wanted}, "pagination": pagination})

    def _page(
        self, total: int, wanted: Mapping[str, Any] = NO_FILTER, *, pages: PageRange = FIRST_PAGE
    ) -> PageRequest:
        def ask() -> JSONResponse:
            return self._line.post(self._query(pages.choose(self._random), PAGE_SIZE, wanted))

        return PageRequest(ask, self.change, total)

    def _event(self, number: int) -> dict[str, Any]:
        peer, own = self._peers[number % _PEERS], self._signer.did
        received = number // _PEERS % 2 == 1
        return {
            "sender_did": peer if received else own,
            "recipient_did": own if received else peer,
            "timestamp": event_time(number),
            "payload": encode_base64(secrets.token_bytes(_PAYLOAD_BYTES)),
            "encrypted_tags": self._tags(number)[: 1 if received else None],
        }

    def _process(self, numbers: Sequence[int]) -> None:
        """What an application does with events that came from others, all but the last round of them."""
        wanted = {"unprocessed_only": True, **_time_range_filter(numbers[0], len(numbers))}
        found = self._line.post(self._query(0, HISTORY_BATCH, wanted)).read()["payload"]["events"]
        updates = []
        for event in found:
            number = (int(event["timestamp"]) - FIRST_SECOND) // SECONDS_APART
            if number // _PEERS % _ROUNDS != _ROUNDS - 1:
                updates.append({"event_id": event["id"], "encrypted_tags": self._tags(number)})
        self._say({"type": "UPDATE_EVENT_TAGS", "events": updates})
        self._changing = updates[0]["event_id"], updates[0]["encrypted_tags"]

    def _tags(self, number: int) -> list[str]:
        peer, kind, topic = self._peers[number % _PEERS], number // _PEERS % EVENT_KINDS, number // EVENTS_PER_TOPIC
        return [self._tag(f"participant.{peer}"), self._tag(f"kind.{kind}"), self._tag(f"topic.{topic}")]


def event_time(number: int) -> int:
    """When an event happened, in Unix seconds."""
    return FIRST_SECOND + number * SECONDS_APART


def _time_range_filter(first: int, count: int) -> dict[str, int]:
    return {"after_timestamp": event_time(first), "before_timestamp": event_time(first + count - 1)}


_PUBLIC_EVENT_TEXT = "x" * 300
_QUERIED_PUBLIC_KIND = 2


class PublicChannel:
    """
    The public events of one identity.

    :param line: leads to its mediator, like `reading`, which is not used for commands.
    """

    def __init__(self, signer: CommandSigner, line: KeepAliveClient, reading: KeepAliveClient) -> None:
        self._signer = signer
        self._line = line
        self._reading = reading
        self._random = Random(1)
        self._path = urlsplit(signer.mediator.public_url(signer.did)).path

    def publications(self, numbers: Sequence[int]) -> list[bytes]:
        """Commands that publish the events of these numbers."""
        return [self._publication(number) for number in numbers]

    def pages(self, count: int) -> dict[str, PageRequest]:
        """
        What there is to read of so many events, by name.

        :param count: a multiple of the batch.
        """
        middle = count // 2
        between = {"after": event_time(middle), "before": event_time(middle + PAGE_SIZE - 1)}
        return {
            **{f"public, {name}": self._page(count, pages=pages) for name, pages in page_ranges(count).items()},
            "public, one tag": self._page(count // EVENT_KINDS, {"tags": f"kind-{_QUERIED_PUBLIC_KIND}"}),
            "public, narrow time range": self._page(PAGE_SIZE, between),
        }

    def change(self) -> None:
        """Publish one, and take it back."""
        event_id = self._line.post(self._publication(0)).read()["public_event_id"]
        deletion = {"type": "DELETE_PUBLIC_EVENT", "public_event_id": event_id}
        self._line.post(self._signer.command(deletion, channel=PUBLIC_CHANNEL)).read()

    def _page(
        self, total: int, wanted: Mapping[str, Any] = NO_FILTER, *, pages: PageRange = FIRST_PAGE
    ) -> PageRequest:
        def ask() -> JSONResponse:
            page = {"page": pages.choose(self._random), "page_size": PAGE_SIZE}
            return self._reading.get(f"{self._path}?{urlencode({**wanted, **page})}")

        return PageRequest(ask, self.change, total)

    def _publication(self, number: int) -> bytes:
        tags = ["blog", f"kind-{number // PAGE_SIZE % EVENT_KINDS}", f"topic-{number // EVENTS_PER_TOPIC}"]
        publication = {
            "type": "PUBLISH_PUBLIC_EVENT",
            "event": _PUBLIC_EVENT_TEXT,
            "tags": tags,
            "timestamp": event_time(number),
            "event_signature": sign_event(_PUBLIC_EVENT_TEXT, tags, event_time(number), self._signer.identity.seed),
        }
        return self._signer.command(publication, channel=PUBLIC_CHANNEL)


COMMAND_BASELINE_GOAL = 0.45

_OF_BASELINE, _OF_BASELINE_PER_CPU = "x stock Site", "x per CPU-s"
_MEDIATORD, _BASELINE = "mediatord, durable", "stock Site, verify and store"
_COMMAND_COLUMNS = (PER_SECOND, PER_CPU_SECOND, "p50 ms", "p99 ms", _OF_BASELINE, _OF_BASELINE_PER_CPU)
# A short event: a line of chat, encrypted.
_SMALLEST_PAYLOAD = 300
_COMMAND_SUCCESS_STATUS = "200"
_WARM_UP_SHARE = 0.25
# Commands per second to have ready for the warm-up, and after it in proportion to what was taken. A server that is
# faster than that has a shorter turn.
_INITIAL_COMMAND_RATE = 4000.0
_COMMAND_RESERVE = 1.5


def measure_commands(plan: BenchmarkPlan) -> ResultTable:
    """One table for all sizes."""
    rows: dict[str, Figures] = {}
    targets: list[PerformanceTarget] = []
    with ExitStack() as stack:
        daemon = stack.enter_context(run_temporary_daemon(DAEMON_SETTINGS))
        place = Path(stack.enter_context(TemporaryDirectory(prefix="mediatord-bench-")))
        site = stack.enter_context(
            spawn_module("mediatord.bench.baseline_servers", "commands", str(place / DATABASE_FILE))
        )
        signers = register_signers(daemon.url)
        ours = TargetServer.at(signers.mediator.url, daemon.pid, JSON_TYPE, _COMMAND_SUCCESS_STATUS)
        floor = TargetServer(site.pid, int(read_line(site)), ours.path, JSON_TYPE, _COMMAND_SUCCESS_STATUS)
        accounts = {
            _MEDIATORD: StoredMessageCheck(
                ours, lambda: count_stored_rows(daemon.directory / DATABASE_FILE, "pending_event")
            ),
            _BASELINE: StoredMessageCheck(floor, lambda: count_stored_rows(place / DATABASE_FILE, "event")),
        }
        for size in (_SMALLEST_PAYLOAD, *plan.sizes):
            supply = _CommandFile(signers, size, place / "bodies")
            rounds = _compare_commands(
                plan, {name: _CommandContender(one, supply, plan.clients) for name, one in accounts.items()}
            )
            name = format_size(size)
            for contender in rounds.found:
                rows[f"{name}  {contender}"] = rounds.medians(contender) | _command_ratios(rounds, contender)
            measured = rows[f"{name}  {_MEDIATORD}"][_OF_BASELINE]
            targets.append(
                PerformanceTarget(f"durable commands {name}, x stock Site", COMMAND_BASELINE_GOAL, measured)
            )
    counted = accounts[_MEDIATORD]
    notes = (
        f"{plan.clients} connections, one daemon process. The stock Site parses and verifies, and stores in groups.",
        f"{counted.accepted} commands were answered 200 and {counted.stored} rows were stored.",
    )
    failures = tuple(f"{name}: {failure}" for name, one in accounts.items() for failure in one.failures)
    return ResultTable("Commands, durable before the answer", _COMMAND_COLUMNS, rows, tuple(targets), notes, failures)


@dataclass(frozen=True, slots=True)
class _CommandFile:
    """
    Commands signed just before they are sent.

    :param size: characters of the payload.
    :param bodies: the file that they are written to.
    """

    signers: CommandSigners
    size: int
    bodies: Path

    def write(self, count: int) -> Path:
        """So many new ones, in place of those before."""
        write_bodies(self.bodies, list(sign_private_commands(self.signers, self.size, count)))
        return self.bodies


class _CommandContender:
    """One contender: has commands signed, as many as it is likely to take, and then takes them."""

    def __init__(self, stored_check: StoredMessageCheck, supply: _CommandFile, clients: int) -> None:
        self._stored_check = stored_check
        self._supply = supply
        self._clients = clients
        self._expected = _INITIAL_COMMAND_RATE

    def run(self, seconds: float) -> Figures:
        """Only the posting counts."""
        bodies = self._supply.write(self._clients + ceil(self._expected * seconds * _COMMAND_RESERVE))
        figures = self._stored_check.check(post_each_once(self._stored_check.server, bodies, self._clients, seconds))
        self._expected = figures[PER_SECOND]
        return figures


def _compare_commands(plan: BenchmarkPlan, contenders: Mapping[str, _CommandContender]) -> InterleavedResults:
    for contender in contenders.values():
        contender.run(plan.seconds * _WARM_UP_SHARE)
    return run_interleaved({name: _command_turn(one, plan.seconds) for name, one in contenders.items()}, plan.rounds)


def _command_turn(contender: _CommandContender, seconds: float) -> Contender:
    return lambda: contender.run(seconds)


def _command_ratios(rounds: InterleavedResults, contender: str) -> Figures:
    return {
        _OF_BASELINE: rounds.ratio(contender, _BASELINE, PER_SECOND),
        _OF_BASELINE_PER_CPU: rounds.ratio(contender, _BASELINE, PER_CPU_SECOND),
    }


LONG_HISTORY_GOAL = 0.5

# A thousand events of a history go into one command.
_SETTINGS = {**DAEMON_SETTINGS, "MEDIATORD_LIMITS__MAX_MESSAGE_BYTES": "8388608"}
_SMALL, _LARGE = "small", "large"
_PUBLIC_SHARE = 10
_AT_ONCE = 5000
# There are many lists to read, and a page takes milliseconds.
_TURN_SHARE = 0.1
_FEWEST_READ = 3
_RATE, _MILLISECONDS, _OF_SMALL = "pages/s", "p50 ms", "x small"
_PAGE_COLUMNS = (*(f"{name} {figure}" for figure in (_MILLISECONDS, _RATE) for name in (_SMALL, _LARGE)), _OF_SMALL)


@dataclass(frozen=True, slots=True)
class _HistoryDaemon:
    """
    One identity at a daemon of its own, with as many events as are to be read.

    :param published: how many public ones.
    """

    server: TargetServer
    history: StoredHistory
    feed: PublicChannel
    stored: int
    published: int

    def pages(self) -> dict[str, PageRequest]:
        """All there is to ask for."""
        return self.history.pages(self.stored) | self.feed.pages(self.published)

    def fill(self, bodies: Path, connections: int) -> Iterator[int]:
        """
        Store and publish; yields how many were, after each step.

        :param bodies: a file to put commands into.
        :raise RuntimeError: something was refused.
        """
        yield from self.history.fill(self.stored)
        for first in range(0, self.published, _AT_ONCE):
            numbers = range(first, min(first + _AT_ONCE, self.published))
            write_bodies(bodies, self.feed.publications(numbers))
            load = post_each_once(self.server, bodies, connections)
            if load.accepted != len(numbers):
                raise RuntimeError(f"not all public events were accepted: {load.statuses}")
            yield len(numbers)


def measure_pages(plan: BenchmarkPlan) -> ResultTable:
    """One table for all that is asked for."""
    large = max(plan.events // HISTORY_BATCH * HISTORY_BATCH, HISTORY_BATCH)
    notes = []
    with ExitStack() as stack:
        history_daemons = {
            name: stack.enter_context(_start_history_daemon(count))
            for name, count in ((_SMALL, HISTORY_BATCH), (_LARGE, large))
        }
        with TemporaryDirectory(prefix="mediatord-bench-") as place:
            for name, history_daemon in history_daemons.items():
                notes.append(f"{name}: {_fill_history(history_daemon, Path(place) / 'bodies', plan.clients)}")
        small, other = (history_daemons[name].pages() for name in (_SMALL, _LARGE))
        rounds = {}
        for name in small:
            rounds[name] = _compare_pages(plan, small[name], other[name], changing=False)
            rounds[f"{name}, after a change"] = _compare_pages(plan, small[name], other[name], changing=True)
    rows = {name: _page_row(found) for name, found in rounds.items()}
    targets = tuple(
        PerformanceTarget(f"rate of {name}, x small", LONG_HISTORY_GOAL, row[_OF_SMALL]) for name, row in rows.items()
    )
    return ResultTable("Pages of a long history and of a short one", _PAGE_COLUMNS, rows, targets, tuple(notes))


@contextmanager
def _start_history_daemon(count: int) -> Iterator[_HistoryDaemon]:
    with ExitStack() as stack:
        daemon = stack.enter_context(run_temporary_daemon(_SETTINGS))
        mediator = fetch_decentrl_mediator(daemon.url)
        line, reading = (stack.enter_context(KeepAliveClient(mediator.url)) for _ in range(2))
        signer = register_signer(mediator, line, "owner")
        server = TargetServer.at(mediator.url, daemon.pid, JSON_TYPE, "200")
        published = max(HISTORY_BATCH, count // _PUBLIC_SHARE // HISTORY_BATCH * HISTORY_BATCH)
        yield _HistoryDaemon(
            server, StoredHistory(signer, line), PublicChannel(signer, line, reading), count, published
        )


def _fill_history(history_daemon: _HistoryDaemon, bodies: Path, connections: int) -> str:
    """Fill it, and say how that went."""
    start = perf_counter()
    what = f"{history_daemon.stored:,} stored and {history_daemon.published:,} public events"
    with click.progressbar(
        length=history_daemon.stored + history_daemon.published, label=what, file=sys.stderr
    ) as bar:
        for done in history_daemon.fill(bodies, connections):
            bar.update(done)
    return f"{what}, there after {perf_counter() - start:,.0f} s"


def _compare_pages(
    plan: BenchmarkPlan, small: PageRequest, large: PageRequest, *, changing: bool
) -> InterleavedResults:
    seconds = plan.seconds * _TURN_SHARE
    for page in (small, large):
        page.read()
    contenders = {
        _SMALL: _page_contender(small, seconds, changing),
        _LARGE: _page_contender(large, seconds, changing),
    }
    return run_interleaved(contenders, plan.rounds)


def _page_contender(page: PageRequest, seconds: float, changing: bool) -> Contender:
    def read() -> Figures:
        spent: list[float] = []
        while len(spent) < _FEWEST_READ or sum(spent) < seconds:
            if changing:
                page.change()
            spent.append(page.read())
        return {_RATE: len(spent) / sum(spent), _MILLISECONDS: compute_percentile(spent, 0.5) * 1000}

    return read


def _page_row(found: InterleavedResults) -> Figures:
    figures = {f"{name} {figure}": number for name in found.found for figure, number in found.medians(name).items()}
    return {**figures, _OF_SMALL: found.ratio(_LARGE, _SMALL, _RATE)}
