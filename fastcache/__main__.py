"""`python -m fastcache`: the command line. Imports cli."""

from fastcache.cli import main

main()
