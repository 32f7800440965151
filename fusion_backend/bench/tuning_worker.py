"""The process that ``on_the_spot`` starts: it measures one MLP and leaves.

    python -m fusion_backend.bench.tuning_worker < request > answer

Request and answer are JSON objects: the fields of a ``Case`` and the number of the GPU; the line of
a table.
"""

from __future__ import annotations

import json
import sys

import torch

from fusion_backend.bench.tuning import measure
from fusion_backend.planning.cases import Case


def main() -> int:
    """Read the request, measure, and print the answer as the last line."""
    request = json.load(sys.stdin)
    device = torch.device("cuda", request["device"])
    print(json.dumps(measure(Case(**request["case"]), device, max_autotune=True)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
