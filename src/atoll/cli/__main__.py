"""`python -m atoll.cli` is the `atoll` command."""

from atoll.cli import main

main()
