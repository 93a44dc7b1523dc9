"""`python -m pgqueue`: the command line."""

from pgqueue.cli import main

main()
