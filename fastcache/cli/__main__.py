"""`python -m fastcache.cli`: the console script by another name."""

from fastcache.cli import main

main(prog_name="fastcache")
