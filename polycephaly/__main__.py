"""`python -m polycephaly`: the `polycephaly` command."""

from polycephaly.cli import main

main(prog_name="polycephaly")
