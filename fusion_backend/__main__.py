"""``python -m fusion_backend`` is the command ``fusedmlp``."""

from __future__ import annotations

import sys

from fusion_backend.cli import main

if __name__ == "__main__":
    sys.exit(main())
