"""``python -m tests.torture``: see :mod:`tests.torture.cli`. Forked daemons do not import what is in here."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["lane"]:
        from tests.torture.round_worker import main as lane

        lane(sys.argv[2])
    else:
        from tests.torture.cli import main

        sys.exit(main(sys.argv[1:]))
