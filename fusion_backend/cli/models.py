"""Real models with random weights, for `fusedmlp demo` and `benchmarks/models.py`.

The classes are the published ones of `transformers` and `torch.nn`, unchanged. Weights are random,
so nothing is downloaded: what is fused, the kernels and their times do not depend on the values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

#: What a factory returns: a module and the keyword arguments (tensors) of its forward.
Built = tuple[nn.Module, dict[str, Any]]


@dataclass(frozen=True)
class ModelCase:
    """One model and one batch. `build()` makes both, in torch's default dtype and device."""

    name: str
    batch: str
    build: Callable[[], Built]
    training: bool = False
    needs_transformers: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


def tokens(batch: int, length: int, vocabulary: int) -> torch.Tensor:
    """Random token numbers, int64 of shape (batch, length)."""
    return torch.randint(0, vocabulary, (batch, length))


def gpt2(batch: int, length: int, **config: Any) -> Built:
    """GPT-2 (defaults: the 124 M "small" one): Conv1D weights, tanh-GELU."""
    from transformers import GPT2Config, GPT2Model

    settings = GPT2Config(use_cache=False, **config)
    return GPT2Model(settings), {"input_ids": tokens(batch, length, settings.vocab_size)}


def bert(batch: int, length: int, **config: Any) -> Built:
    """BERT (defaults: base, uncased): erf-GELU with biases."""
    from transformers import BertConfig, BertModel

    settings = BertConfig(**config)
    return BertModel(settings), {"input_ids": tokens(batch, length, settings.vocab_size)}


def vit(batch: int, **config: Any) -> Built:
    """ViT (defaults: base, 16 × 16 patches of 224 × 224 pixels): erf-GELU with biases."""
    from transformers import ViTConfig, ViTModel

    settings = ViTConfig(**config)
    pixels = torch.randn(batch, 3, settings.image_size, settings.image_size)
    return ViTModel(settings), {"pixel_values": pixels}


def siglip(batch: int, **config: Any) -> Built:
    """SigLIP's image tower (defaults: base, 16 × 16 patches): tanh-GELU with biases."""
    from transformers import SiglipVisionConfig, SiglipVisionModel

    settings = SiglipVisionConfig(**config)
    pixels = torch.randn(batch, 3, settings.image_size, settings.image_size)
    return SiglipVisionModel(settings), {"pixel_values": pixels}


def llama(batch: int, length: int, **config: Any) -> Built:
    """Llama (defaults: the 1 B class, 16 layers of 2048/8192, 8 key-value heads): SwiGLU."""
    from transformers import LlamaModel

    settings = llama_config(use_cache=False, **config)
    return LlamaModel(settings), {"input_ids": tokens(batch, length, settings.vocab_size)}


def llama_decoding(batch: int, context: int, **config: Any) -> Built:
    """One token a sequence after ``context`` tokens in a static cache twice as long."""
    from transformers import LlamaModel

    settings = llama_config(**config)
    decoder = Decoder(LlamaModel(settings), batch, context)
    return decoder, {"input_ids": tokens(batch, 1, settings.vocab_size)}


def llama_config(**config: Any) -> Any:
    """The configuration of a Llama, of the 1 B class by default."""
    from transformers import LlamaConfig

    shape = {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    }
    return LlamaConfig(**(shape | config))


#: The 8 B class: 32 layers of 4096/14336, 8 key-value heads.
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
}


class Decoder(nn.Module):
    """A decoder-only model that is given one token a sequence, with a static cache.

    Every call writes the cache and moves on by one token; :meth:`rewind` goes back to the start.
    The cache holds zeros, which takes the same time as anything else. It has torch's default dtype
    and device at the time of construction.
    """

    def __init__(self, model: Any, batch: int, context: int) -> None:
        from transformers import StaticCache

        super().__init__()
        self.model, self.context = model, context
        config = model.config
        self.cache = StaticCache(config=config, max_cache_len=2 * context)
        head_width = config.hidden_size // config.num_attention_heads
        self.cache.early_initialization(
            batch,
            config.num_key_value_heads,
            head_width,
            torch.get_default_dtype(),
            torch.get_default_device(),
        )
        # The names of these arguments have changed from one version of transformers to the next.
        parameters = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"
        self.position: torch.Tensor
        self.register_buffer("position", torch.tensor([context]), persistent=False)
        self.takes_position = "cache_position" in parameters
        self.rewind()

    def rewind(self) -> None:
        """Forget all tokens after the first ``context``."""
        for layer in self.cache.layers:
            if hasattr(layer, "cumulative_length"):  # some versions count the tokens written
                layer.cumulative_length.fill_(self.context)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Hidden states ``(batch, 1, width)`` of the tokens ``(batch, 1)``."""
        arguments: dict[str, Any] = {self.cache_name: self.cache, "use_cache": True}
        if self.takes_position:
            arguments["cache_position"] = self.position
        states: torch.Tensor = self.model(
            input_ids, position_ids=self.position.unsqueeze(0), **arguments
        ).last_hidden_state
        return states


def t5(batch: int, length: int, **config: Any) -> Built:
    """T5 1.1 (defaults: small): GeGLU without bias, in the encoder and the decoder."""
    from transformers import T5Config, T5Model

    settings = T5Config(feed_forward_proj="gated-gelu", use_cache=False, **config)
    ids = tokens(batch, length, settings.vocab_size)
    return T5Model(settings), {"input_ids": ids, "decoder_input_ids": ids}


def encoder_layer(batch: int, length: int, width: int, hidden: int) -> Built:
    """PyTorch's own transformer layer, without dropout: erf-GELU with biases."""
    layer = nn.TransformerEncoderLayer(
        width, width // 64, hidden, dropout=0.0, activation="gelu", batch_first=True
    )
    return layer, {"src": torch.randn(batch, length, width)}


def sequential_mlp(rows: int, width: int, hidden: int, approximate: str = "tanh") -> Built:
    """Linear, GELU, Linear."""
    mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(approximate), nn.Linear(hidden, width))
    return mlp, {"input": torch.randn(rows, width)}


OPAQUE_LAYER = (
    "In evaluation without gradients PyTorch runs this layer as one operator of its own. It is "
    "taken apart where its MLP is fused."
)


def cpu_cases() -> tuple[ModelCase, ...]:
    """The models of the demo at sizes for which two cores need seconds."""
    shape = {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    gpt2_shape = {"n_embd": 256, "n_layer": 2, "n_head": 4}
    t5_shape = {"d_model": 256, "d_ff": 1024, "num_layers": 1, "num_heads": 4}
    image = {"image_size": 64, "patch_size": 8}
    # Special tokens, which would otherwise lie beyond the end of a small vocabulary.
    words = {"vocab_size": 1000, "bos_token_id": 0, "eos_token_id": 1}
    return (
        torch_case("nn.Sequential", "4096 rows", lambda: sequential_mlp(4096, 64, 256)),
        torch_case(
            "nn.Sequential (many rows)",
            "32768 rows",
            lambda: sequential_mlp(32768, 64, 256, "none"),
        ),
        ModelCase("GPT-2", "8 × 64 tokens", lambda: gpt2(8, 64, **gpt2_shape, **words)),
        ModelCase("BERT", "8 × 64 tokens", lambda: bert(8, 64, **shape, vocab_size=1000)),
        ModelCase("ViT", "8 images of 64 × 64", lambda: vit(8, **image, **shape)),
        ModelCase("SigLIP", "8 images of 64 × 64", lambda: siglip(8, **image, **shape)),
        ModelCase(
            "Llama",
            "8 × 64 tokens",
            lambda: llama(8, 64, num_key_value_heads=2, **shape, **words),
        ),
        ModelCase("T5", "8 × 64 tokens", lambda: t5(8, 64, **t5_shape, vocab_size=1000)),
        torch_case(
            "nn.TransformerEncoderLayer (evaluation)",
            "8 × 64 rows",
            lambda: encoder_layer(8, 64, 256, 1024),
            note=OPAQUE_LAYER,
        ),
        torch_case(
            "nn.TransformerEncoderLayer (training)",
            "8 × 64 rows",
            lambda: encoder_layer(8, 64, 256, 1024),
            training=True,
        ),
    )


def gpu_cases() -> tuple[ModelCase, ...]:
    """The models of the demo at their published sizes."""
    return (
        torch_case("nn.Sequential", "65536 rows", lambda: sequential_mlp(65536, 64, 256)),
        ModelCase("GPT-2", "1 × 128 tokens", lambda: gpt2(1, 128)),
        ModelCase("BERT", "1 × 128 tokens", lambda: bert(1, 128)),
        ModelCase("ViT", "1 image of 224 × 224", lambda: vit(1)),
        ModelCase("SigLIP", "1 image of 224 × 224", lambda: siglip(1)),
        ModelCase("Llama", "16 × 1 tokens", lambda: llama(16, 1)),
        ModelCase("T5", "1 × 128 tokens", lambda: t5(1, 128)),
        torch_case(
            "nn.TransformerEncoderLayer (evaluation)",
            "16 × 256 rows",
            lambda: encoder_layer(16, 256, 768, 3072),
            note=OPAQUE_LAYER,
        ),
        torch_case(
            "nn.TransformerEncoderLayer (training)",
            "16 × 256 rows",
            lambda: encoder_layer(16, 256, 768, 3072),
            training=True,
        ),
    )


def torch_case(name: str, batch: str, build: Callable[[], Built], **settings: Any) -> ModelCase:
    """A model that needs nothing but PyTorch."""
    return ModelCase(name, batch, build, needs_transformers=False, **settings)
