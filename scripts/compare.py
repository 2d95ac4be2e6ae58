"""`flowgrpo compare` as a script: python scripts/compare.py RUN [options]."""

import sys

from flowgrpo.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "compare")
    main()
