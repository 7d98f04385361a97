"""`python -m lightning_mp` is `lightning-mp`."""

import sys

from lightning_mp.cli import main

if __name__ == "__main__":
    sys.exit(main())
