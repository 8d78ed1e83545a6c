"""``python -m mediatord`` is the console script."""

from mediatord.cli.commands import main

main()
