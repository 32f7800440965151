"""Watch the fusions of a model that Lightning trains.

pip install lightning
python examples/lightning_callback.py
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fusion_backend


class WatchFusions(lightning.Callback):
    """Profiles a training step now and then, and warns where MLPs are not run as planned."""

    def __init__(self, **settings: Any) -> None:
        self.watch = fusion_backend.watch(**settings)

    def on_train_start(self, *args: Any) -> None:
        self.watch.__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        self.watch.step()

    def teardown(self, *args: Any, **kwargs: Any) -> None:  # also after an exception
        self.watch.__exit__(None, None, None)
        print(self.watch)


class Regression(lightning.LightningModule):
    """An MLP that learns to return its input."""

    def __init__(self) -> None:
        super().__init__()
        mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        # "always": whether this machine would be faster is not the question here.
        self.mlp = torch.compile(mlp, backend="fusedmlp", options={"fusedmlp.policy": "always"})

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(self.mlp(batch[0]), batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def main() -> None:
    data = DataLoader(TensorDataset(torch.randn(256, 64)), batch_size=32)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[WatchFusions(first=2, every=3, on_problem="raise")],
    )  # fmt: skip
    trainer.fit(Regression(), data)


if __name__ == "__main__":
    main()
