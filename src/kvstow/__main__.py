"""``python -m kvstow`` is ``kvstow``."""

from kvstow.cli import main

if __name__ == "__main__":
    main(prog_name="kvstow")
