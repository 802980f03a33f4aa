"""``python -m pilotfish``: the command line."""

from pilotfish.cli import main

if __name__ == "__main__":
    main()
