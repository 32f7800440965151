"""Training on two GPUs by NCCL, as ``tests/test_distributed.py`` does on a CPU."""

from __future__ import annotations

import pytest
import torch

from ranks import check_on_ranks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it needs two GPUs")


@pytest.mark.parametrize(
    "name", ["data parallel", "tensor parallel", "tensor parallel by Inductor"]
)
def test_training_on_two_gpus_is_eagers(children, tmp_path, name):
    check_on_ranks(children, name, 2, tmp_path, on_gpus=True)
