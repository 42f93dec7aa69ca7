"""`python -m polycephaly`: the `polycephaly` command."""

from .cli import main

main(prog_name="polycephaly")
