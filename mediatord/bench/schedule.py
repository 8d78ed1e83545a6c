"""
Requests at times that were fixed beforehand, whatever the server does meanwhile.

A client that waits for its answer before it asks again asks a slow server less often, and so hardly notices when it
stalls ("coordinated omission"). Here every request has a time at which it is to be sent, as those of independent
senders have, and latency counts from that time. One that cannot be sent then, because no connection is free, is sent
as soon as one is, and its wait is part of its latency; none is left out.
"""

from __future__ import annotations

import random
import select
from array import array
from collections.abc import Iterator
from time import perf_counter, process_time

from mediatord.bench.load import Answers, Job, Line, Outcome, silence

# Later than this is late: half of it is what waking up takes.
LATE_SECONDS = 0.001

_PATIENCE_SECONDS = 30.0


def intended_times(rate: float, seconds: float, seed: int, *, even: bool = False) -> array[float]:
    """
    When each request is to be sent, in seconds after the start, none at or after `seconds`.

    :param rate: per second; of a Poisson process on average.
    :param seed: another one gives other times of the same process.
    """
    times = array("d")
    if even:
        times.extend(number / rate for number in range(int(rate * seconds)))
        return times
    draw = random.Random(seed).expovariate
    at = draw(rate)
    while at < seconds:
        times.append(at)
        at += draw(rate)
    return times


class Punctual:
    """Sends every request at its time, or as soon after it as a connection is free."""

    def __init__(self, job: Job, lines: dict[int, Line], requests: Iterator[bytes]) -> None:
        self._lines = lines
        self._requests = requests
        self._idle = list(lines.values())
        self._times = intended_times(job.rate, job.seconds, job.offset, even=job.even)
        self._next = self._late = 0

    def run(self) -> Outcome:
        """Until the last answer is there."""
        answers, latencies_us = Answers(), array("I")
        with select.epoll() as epoll:
            for number in self._lines:
                epoll.register(number, select.EPOLLIN)
            start, start_cpu = perf_counter(), process_time()
            while self._send_due(start) or len(self._idle) < len(self._lines):
                # The clock of epoll ticks in milliseconds.
                select.select([epoll], [], [], self._patience(start))
                self._receive(epoll, answers, latencies_us)
        seconds, spent = perf_counter() - start, process_time() - start_cpu
        return Outcome(answers.by_name(), seconds, list(latencies_us), self._late, spent)

    def _send_due(self, start: float) -> bool:
        """Send what is due; whether there is something left to be sent."""
        times, idle = self._times, self._idle
        while idle and self._next < len(times):
            intended = start + times[self._next]
            lateness = perf_counter() - intended
            if lateness < 0:
                break
            line = idle.pop()
            line.begun = intended
            line.send(next(self._requests))
            self._next += 1
            self._late += lateness > LATE_SECONDS
        return self._next < len(times)

    def _patience(self, start: float) -> float:
        if not self._idle or self._next == len(self._times):
            return _PATIENCE_SECONDS
        return max(0.0, start + self._times[self._next] - perf_counter())

    def _receive(self, epoll: select.epoll, answers: Answers, latencies_us: array[int]) -> None:
        events = epoll.poll(0)
        if not events and len(self._idle) < len(self._lines):
            self._expect_life()
        for number, _ in events:
            line = self._lines[number]
            if answers.take(line):
                latencies_us.append(int((perf_counter() - line.begun) * 1e6))
                self._idle.append(line)

    def _expect_life(self) -> None:
        busy = (line for line in self._lines.values() if line not in self._idle)
        if perf_counter() - min(line.begun for line in busy) > _PATIENCE_SECONDS:
            silence()
