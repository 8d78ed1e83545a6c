"""``python -m tests.torture``: see :mod:`tests.torture.cli`. Forked daemons must not import it."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        from tests.torture.round_worker import main as run_worker

        run_worker(sys.argv[2])
    else:
        from tests.torture.cli import main

        sys.exit(main(sys.argv[1:]))
