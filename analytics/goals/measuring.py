"""All measurements of the goals, one after the other."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from analytics.goals import duck
from analytics.goals.judging import Figures
from analytics.goals.running import Ended, measured, run
from analytics.sample.bulk import DAY, BulkTruth, generate_bulk

_MEMORY = "1g"
# 4: done, but lines are missing, which they are.
_FINE = (0, 4)


def measure(
    work: Path, scale: float, small: float, repeat: int, cpus: Sequence[int], tell: Callable[[str], None]
) -> Figures:
    """
    :param work: a directory for log lines, which stay, and results, which do not.
    :param small: scale of the smaller files.
    :param cpus: that measurements may use; making up log lines may use all.
    :raise AnalyticsError: a step failed.
    """
    logs, less, master = work / f"logs-{scale:g}", work / f"logs-{small:g}", f"local[{len(cpus)}]"
    for directory, size in ((logs, scale), (less, small)):
        directory.mkdir(parents=True, exist_ok=True)
        tell(f"log lines: {generate_bulk(directory, size, processes=os.cpu_count() or 1).lines:,} in {directory}")
    truth = generate_bulk(logs, scale)
    os.sched_setaffinity(0, cpus)
    figures = Figures(lines=truth.lines, size=truth.size)

    scans = [measured("scan", logs=str(logs)) for _ in range(repeat)]
    figures.scan = median(scan["seconds"] for scan in scans)
    tell(f"scan {figures.scan:.1f} s")
    _nights(figures, work, logs, master, max(2, repeat), truth, tell)

    both = measured("ingests", master=master, warm=str(less), logs=[str(less), str(logs)], repeat=repeat)
    figures.ingest, figures.ingest_small = median(both[str(logs)]["ingest"]), median(both[str(less)]["ingest"])
    figures.parse = median(both[str(logs)]["parse"])
    tell(f"ingest {figures.ingest:.1f} s, of less {figures.ingest_small:.1f} s, parsing only {figures.parse:.1f} s")
    alone = measured("ingests", master="local[1]", warm=str(less), logs=[str(logs)], repeat=repeat)
    figures.ingest_alone = median(alone[str(logs)]["ingest"])
    tell(f"ingest by one thread {figures.ingest_alone:.1f} s")

    schemas = measured("schemas", master=master, logs=str(logs), repeat=repeat)
    figures.declared, figures.inferred = median(schemas["declared"]), median(schemas["inferred"])
    tell(f"query {figures.declared:.1f} s, with inferred schema {figures.inferred:.1f} s")
    ducks = [measured("duck", logs=str(logs), threads=len(cpus)) for _ in range(repeat)]
    figures.duck = {name: median(one[name] for one in ducks) for name in ducks[0]}
    return figures


def _nights(
    figures: Figures,
    work: Path,
    logs: Path,
    master: str,
    repeat: int,
    truth: BulkTruth,
    tell: Callable[[str], None],
) -> None:
    """Whole runs, each into a directory of its own; what is compared of them is the same at each."""
    seconds, ingests, rests, found = [], [], [], list[Mapping[str, str]]()
    for number in range(repeat):
        out = work / f"results-{number}"
        shutil.rmtree(out, ignore_errors=True)
        ended = run(_command(logs, out, master, work / "pseudonyms.keys"), _FINE)
        ingest, rest = _parts(ended, out)
        tell(f"night {ended.seconds:.1f} s, {ended.peak / 2**30:.2f} GiB; ingest {ingest:.1f} s, then {rest:.1f} s")
        seconds.append(ended.seconds)
        ingests.append(ingest)
        rests.append(rest)
        found.append(duck.digests(out / "tables"))
        figures.peak = max(figures.peak, ended.peak)
        figures.steps = _steps(out)
        if not number:
            figures.wrong = differences(duck.totals(out / "tables"), truth)
        shutil.rmtree(out)
    figures.night, figures.cold_ingest, figures.after_ingest = median(seconds), median(ingests), median(rests)
    figures.tables = len(found[0])
    names = {name for one in found for name in one}
    figures.unequal = sorted(name for name in names if len({one.get(name) for one in found}) > 1)


def _command(logs: Path, out: Path, master: str, keys: Path) -> list[str]:
    places = ["--logs", str(logs), "--out", str(out), "--keys", str(keys)]
    return ["-m", "analytics", "nightly", *places, "--day", str(DAY), "--master", master, "--memory", _MEMORY]


def _parts(ended: Ended, out: Path) -> tuple[float, float]:
    """Seconds of the ingest, and from its end to the last word that was said."""
    told = next(at for at, line in ended.told if "] ingest " in line)
    return _manifest(out)["seconds"]["ingest"], ended.told[-1][0] - told


def _steps(out: Path) -> dict[str, float]:
    manifest = _manifest(out)
    return {**manifest["seconds"], **{made["job"]: made["seconds"] for made in manifest["jobs"]}}


def _manifest(out: Path) -> dict[str, Any]:
    (path,) = (out / "runs").glob("*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def differences(said: Mapping[str, Any], truth: BulkTruth) -> list[str]:
    """What tables say that is not so, as `name: said, not true`."""
    true: dict[str, Any] = {
        name: getattr(truth, name) for name in ("damaged", "missing", "accepted", "open", "orphans")
    }
    true |= {"difference": 0, "again": 0}
    true |= {name: truth.ended[name] for name in ("acked", "expired", "evicted", "removed")}
    found = [f"{name}: {said[name]}, not {value}" for name, value in true.items() if said[name] != value]
    if said["events"] != dict(truth.events):
        found.append("events")
    if sorted(said["drift"].values()) != sorted(value for value in truth.drift.values() if value):
        found.append(f"counters: {said['drift']}, not {dict(truth.drift)}")
    return found
