"""Load generators: they send the right requests at the right times, at low cost."""

from __future__ import annotations

import gc
import socket
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from threading import Thread
from time import perf_counter
from types import FrameType

import pytest

from mediatord.bench.load_generator import LoadRunner, intended_times
from mediatord.bench.raw_clients import ClientConnection, ResponseCounter, encode_request

ANSWER = b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n"
HELD_SECONDS = 0.05


@contextmanager
def server(held_seconds: float = 0.0) -> Iterator[str]:
    """URL of a server that accepts one connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = Thread(target=lambda: answer_requests(listener.accept()[0], held_seconds))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        thread.join()


def answer_requests(connection: socket.socket, held_seconds: float = 0.0) -> None:
    """Answer requests with one byte, the first one after a delay."""
    until = 0.0
    while connection.recv(1):
        until = until or perf_counter() + held_seconds
        while perf_counter() < until:
            pass
        connection.sendall(ANSWER)
    connection.close()


def test_equal_responses_are_parsed_once() -> None:
    """Only the first of equal responses is parsed; a thousand of them take one Python call each."""
    server_end, client_end = socket.socketpair()
    line, answers, calls = ClientConnection(server_end), ResponseCounter(), 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    # Garbage collection calls functions, too.
    gc.disable()
    try:
        for number in range(1001):
            client_end.sendall(ANSWER)
            sys.setprofile(count if number else None)
            complete = answers.take(line)
            sys.setprofile(None)
            assert complete
    finally:
        gc.enable()
    assert calls == 1000
    assert answers.by_name() == {"202": 1001}
    server_end.close()
    client_end.close()


def test_responses_in_pieces() -> None:
    """A response counts once, with its last byte."""
    server_end, client_end = socket.socketpair()
    line, answers = ClientConnection(server_end), ResponseCounter()
    for _ in range(2):
        for piece, complete in ((ANSWER[:12], False), (ANSWER[12:-1], False), (ANSWER[-1:], True)):
            client_end.sendall(piece)
            assert answers.take(line) is complete
    assert answers.by_name() == {"202": 2}
    client_end.close()
    with pytest.raises(ConnectionError):
        answers.take(line)
    server_end.close()


def test_closed_loop_counts_every_request() -> None:
    """As many responses and latencies as requests; each request follows the response before."""
    with server() as url, closing(LoadRunner(url, iter([b"x"] * 50), 1)) as runner:
        outcome = runner.run()
    assert outcome.statuses == {"202": 50}
    assert len(outcome.latencies_us) == 50


def test_stall_is_in_latencies_of_delayed_requests() -> None:
    """
    During a stall every due request is sent, and each latency counts from its intended time; omitting them would
    leave a single slow response.
    """
    with (
        server(HELD_SECONDS) as url,
        closing(LoadRunner(url, iter([b"x"] * 20), 1, 0.02, rate=1000.0, even=True)) as runner,
    ):
        outcome = runner.run()
    assert outcome.statuses == {"202": 20}
    # All were due within 20 ms of the first, and none was answered within 50 ms.
    assert min(outcome.latencies_us) >= 1e6 * (HELD_SECONDS - 0.02) - 5000
    assert outcome.late >= 18


def test_poisson_arrivals() -> None:
    """As many as the rate says, in order, within the time, and different for another process."""
    times = list(intended_times(1000.0, 2.0, seed=1))
    assert times == sorted(times)
    assert 0 < times[0]
    assert times[-1] < 2.0
    assert 1700 < len(times) < 2300
    assert times == list(intended_times(1000.0, 2.0, seed=1))
    assert times != list(intended_times(1000.0, 2.0, seed=2))
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    # In an exponential distribution a share of e^-1 exceeds the mean.
    assert 0.3 < sum(gap > 0.001 for gap in gaps) / len(gaps) < 0.44


def test_regular_arrivals() -> None:
    """One request per interval, the first at once."""
    assert list(intended_times(10.0, 0.5, seed=1, even=True)) == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


def test_content_length() -> None:
    """A POST has the length of its body, a GET has none."""
    posted = encode_request("http://example.org/didcomm", b"body")
    assert posted.startswith(b"POST /didcomm HTTP/1.1\r\nHost: example.org:80\r\n")
    assert posted.endswith(b"Content-Length: 4\r\n\r\nbody")
    asked = encode_request("http://example.org/health?a=b", method="GET")
    assert asked.startswith(b"GET /health?a=b HTTP/1.1\r\n")
    assert b"Content" not in asked
    assert asked.endswith(b"\r\n\r\n")
