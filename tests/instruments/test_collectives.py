"""How long collectives are under way in a step."""

from __future__ import annotations

from fusion_backend.instruments.collectives import Collectives, collectives_in
from fusion_backend.instruments.profiler_trace import STEP, Event, Step, split_steps

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def kernel(name: str, start: float, duration: float, stream: int = 7) -> Event:
    return Event("kernel", name, start, duration, (0, stream))


def test_a_collective_is_exposed_where_nothing_else_runs_on_the_gpu():
    events = [
        kernel("gemm", 100.0, 40.0),
        kernel(NCCL, 120.0, 60.0, stream=20),
        kernel("adam", 160.0, 10.0),
        kernel("gemm", 190.0, 10.0),
    ]
    assert collectives_in(Step("train", gpu=events)) == Collectives(100.0, 60.0, 30.0)


def test_collectives_that_overlap_count_once():
    events = [kernel(NCCL, 0.0, 10.0, stream=20), kernel(NCCL, 5.0, 10.0, stream=21)]
    assert collectives_in(Step("train", gpu=events)) == Collectives(15.0, 15.0, 15.0)


def test_on_a_cpu_what_gloos_threads_do_is_found_in_the_trace():
    events = [
        Event("user_annotation", STEP + "train", 0.0, 100.0, (1, 1)),
        Event("cpu_op", "aten::mm", 10.0, 30.0, (1, 1)),
        Event("user_annotation", "gloo:all_reduce", 30.0, 20.0, (1, 2)),
        Event("user_annotation", "Optimizer.step#AdamW.step", 60.0, 20.0, (1, 1)),
    ]
    (step,) = split_steps(events)
    assert collectives_in(step) == Collectives(40.0, 20.0, None)
