"""`python -m miles` is the command `miles`."""

from miles.cli import main

main()
