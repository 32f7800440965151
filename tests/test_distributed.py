"""Training on several ranks: data parallel, sharded, tensor and sequence parallel."""

from __future__ import annotations

import pytest
import torch.distributed

from ranks import check_on_ranks

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="PyTorch was built without torch.distributed"
)


def test_data_parallel_training_is_eagers(children, tmp_path):
    check_on_ranks(children, "data parallel", 2, tmp_path)


def test_tensor_parallel_training_is_eagers(children, tmp_path):
    check_on_ranks(children, "tensor parallel", 2, tmp_path)


@pytest.mark.slow
def test_tensor_parallel_training_by_inductor_is_eagers(children, tmp_path):
    check_on_ranks(children, "tensor parallel by Inductor", 2, tmp_path)


@pytest.mark.slow
def test_tensor_parallel_training_on_four_ranks_is_eagers(children, tmp_path):
    check_on_ranks(children, "tensor parallel", 4, tmp_path)


@pytest.mark.slow
def test_tensor_parallel_within_sharded_data_parallel_training_is_eagers(children, tmp_path):
    check_on_ranks(children, "both", 4, tmp_path)
