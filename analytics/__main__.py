"""`python -m analytics`, and the program for `spark-submit`."""

import sys
from pathlib import Path

from analytics.cli import main

if __package__ in (None, ""):
    # By spark-submit: its directory is where Python looks for modules, and not the one above.
    sys.path[0] = str(Path(__file__).resolve().parents[1])


# Processes that read segments import the main program, too.
if __name__ == "__main__":
    main()
