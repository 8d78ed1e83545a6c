"""``python -m mediatord`` is the console script."""

from mediatord.cli import main

main()
