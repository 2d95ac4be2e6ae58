"""`flowgrpo train` as a script: python scripts/train.py CONFIG [section.key=value ...]."""

import sys

from flowgrpo.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    main()
