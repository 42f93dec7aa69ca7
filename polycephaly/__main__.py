"""The `polycephaly` command, for ``python -m polycephaly``."""

from .cli import main

main(prog_name="polycephaly")
