"""``python -m flwr_hetero.fleet``: a real fleet on this machine, and keys for one elsewhere."""

import sys

from flwr_hetero.fleet.cli import main

sys.exit(main())
