"""
The report in a real Chromium, without a network: on a phone and on a desktop, in light and in dark.

Screenshots are left in `var/report-screenshots` to be looked at.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from analytics.report.page import rendered
from tests.analytics.busy_day import BUSY, known

PROJECT = Path(__file__).parents[2]
BROWSER = PROJECT / ".node-browser"
SCREENSHOTS = PROJECT / "var" / "report-screenshots"
LOOKS = ("phone-light", "phone-dark", "desktop-light", "desktop-dark")
# It opens four pages; a busy machine takes a minute.
_SECONDS = 300

Look = dict[str, Any]


def looks(files: dict[str, bytes], folder: Path) -> dict[str, Look]:
    """
    What `tests/foreign/browser/look.mjs` found, by the name of the look.

    Skips the test where no browser is installed, or the machine lacks libraries that it needs.
    """
    node = shutil.which("node")
    if node is None or not (BROWSER / ".installed").exists():
        pytest.skip("no Chromium is installed; `make .node-browser` does that, with Node 20 or later")
    for name, content in files.items():
        (folder / name).write_bytes(content)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    # Beside the packages that it imports; the browser is unpacked there once.
    shutil.copy(PROJECT / "tests" / "foreign" / "browser" / "look.mjs", BROWSER)
    unpacked = BROWSER / "unpacked"
    unpacked.mkdir(exist_ok=True)
    environ = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    done = subprocess.run(
        [node, BROWSER / "look.mjs", folder / "index.html", SCREENSHOTS],
        capture_output=True,
        text=True,
        env={**environ, "TMPDIR": str(unpacked)},
        timeout=_SECONDS,
        check=False,
    )
    if "error while loading shared libraries" in done.stderr:
        pytest.skip("Chromium lacks libraries of this machine; `apt-get install libnss3 libnspr4` brings them")
    assert done.returncode == 0, done.stderr
    return {look["name"]: look for look in json.loads(done.stdout)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Look]:
    return looks(rendered(known(BUSY)), tmp_path_factory.mktemp("report"))


@pytest.mark.parametrize("name", LOOKS)
def test_it_looks_right(found: dict[str, Look], name: str) -> None:
    look = found[name]

    assert look["complaints"] == []
    assert look["requests"] == []
    assert look["scripts"] == 0
    assert look["wide"] == []
    assert look["scrollWidth"] == look["clientWidth"]
    assert look["texts"] > 1000
    assert look["faint"] == []
    assert look["smallestText"] >= 10
    pictures = sorted(SCREENSHOTS.glob(f"{name}-*.png"))
    assert pictures and all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


def test_light_and_dark_differ(found: dict[str, Look]) -> None:
    backgrounds = {name: found[name]["background"] for name in LOOKS}

    assert backgrounds["phone-light"] == backgrounds["desktop-light"] == "rgb(246, 246, 243)"
    assert backgrounds["phone-dark"] == backgrounds["desktop-dark"] == "rgb(19, 22, 25)"


def test_the_browser_sees_what_is_wrong(tmp_path: Path) -> None:
    """Faint text, a table wider than the page, a script and a picture from elsewhere: none goes unnoticed."""
    page = b"""<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">
    <body style="background: #fff; color: #eee">faint<div style="width: 2000px">wide</div>
    <img src="http://127.0.0.1:9/x.png"><script>console.log("here")</script>"""

    for look in looks({"index.html": page}, tmp_path).values():
        assert [each["text"] for each in look["faint"]] == ["faint", "wide"]
        assert look["wide"] and look["scrollWidth"] > look["clientWidth"]
        assert look["requests"] == ["http://127.0.0.1:9/x.png"]
        assert "here" in look["complaints"] and look["scripts"] == 1
