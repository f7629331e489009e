"""Run the command line: `python -m regard`."""

from regard.cli import main

main()
