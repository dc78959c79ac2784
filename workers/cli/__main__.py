"""``python -m workers.cli``: the command where no console script is installed."""

from workers.cli import main

main()
