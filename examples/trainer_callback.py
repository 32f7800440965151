"""Watch the fusions of a model that transformers' Trainer trains.

`TrainingArguments(torch_compile_backend="fusedmlp")` is refused: accelerate has a closed list of
backends. So the model is compiled in place before the Trainer gets it.

python examples/trainer_callback.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import fusion_backend


class WatchFusions(TrainerCallback):
    """Profiles a training step now and then, and warns where MLPs are not run as planned."""

    def __init__(self, **settings: Any) -> None:
        self.watch = fusion_backend.watch(**settings)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.watch.__enter__()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.watch.step()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.watch.__exit__(None, None, None)
        print(self.watch)


def main() -> None:
    torch.manual_seed(0)
    tokens = {"vocab_size": 128, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(**tokens, n_positions=32, n_embd=64, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config)
    # "always": whether this machine would be faster is not the question here.
    model.compile(backend="fusedmlp", options={"fusedmlp.policy": "always"})
    texts = torch.randint(0, 128, (16, 32))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=8, per_device_train_batch_size=2,
            report_to=[], disable_tqdm=True, save_strategy="no",
        )  # fmt: skip
        data = [{"input_ids": text, "labels": text} for text in texts]
        watching = WatchFusions(first=2, every=3, on_problem="raise")
        Trainer(model, arguments, train_dataset=data, callbacks=[watching]).train()


if __name__ == "__main__":
    main()
