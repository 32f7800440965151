"""Which MLPs of real models can be fused: unmodified classes of transformers and timm.

    python benchmarks/corpus.py                    # all, some minutes; writes results/corpus.json
    python benchmarks/corpus.py --models Llama,ViT # those whose name begins so; keeps the others
    python benchmarks/corpus.py --page             # writes docs/coverage.md from the results

Each class is built small, with random weights and without a network, and run in evaluation and in
training mode, in a process of its own with a time limit. Every legal site is rewritten (policy
"always"), so that the results can be compared with eager's: most into ATen operators, which is not
to be fused. On a CPU, fused are those in evaluation whose activation oneDNN computes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from pointwise_joins import joined_layers, storages

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "corpus.json"
PAGE = ROOT / "docs" / "coverage.md"
SECONDS = 240
# Relative to the largest element; a rewrite that computes something else is far above.
TOLERANCE = 1e-4

TEXT = "input_ids"
SEQUENCES = "input_ids and decoder_input_ids"
IMAGES = "pixel_values"
PAIRS = "input_ids and pixel_values"
SOUND = "input_values"

VOCABULARY, IMAGE_SIZE = 99, 32
TOKENS = (2, 16)  # sequences, and tokens of each

# What makes a configuration small, wherever it has an attribute of that name.
_SMALL: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size"), 32),
    **dict.fromkeys(("embed_dim", "projection_dim", "word_embed_proj_dim", "emb_dim"), 32),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "hidden_dim", "n_inner"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "type_vocab_size"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "patch_size", "rotary_dim"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("pad_token_id", "eos_token_id", "bos_token_id"), 0),
    **dict.fromkeys(("decoder_start_token_id", "sep_token_id", "cls_token_id"), 0),
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "image_size": IMAGE_SIZE,
    "use_cache": False,
}


class Case(NamedTuple):
    """One class: what it reads, and what else its configuration needs to be small."""

    name: str
    inputs: str
    settings: Mapping[str, Any] = {}


def _cases(inputs: str, *names: str, **settings: Any) -> Iterable[Case]:
    return (Case(name, inputs, settings) for name in names)


CASES: tuple[Case, ...] = (
    *_cases(TEXT, "BertModel", "BertForMaskedLM", "RobertaModel", "ElectraModel", "AlbertModel"),
    *_cases(TEXT, "DistilBertModel", "CamembertModel", "XLMRobertaModel", "MPNetModel"),
    *_cases(TEXT, "DebertaModel", "DebertaV2Model", "ErnieModel", "ConvBertModel", "FNetModel"),
    *_cases(TEXT, "ModernBertModel", "RoFormerModel", "SqueezeBertModel", "NystromformerModel"),
    *_cases(TEXT, "MegatronBertModel", "EsmModel", "XLNetModel", "FunnelModel", "MobileBertModel"),
    *_cases(TEXT, "GPT2Model", "GPT2LMHeadModel", "GPTNeoXModel", "GPTJModel"),
    *_cases(TEXT, "GPTBigCodeModel", "CodeGenModel", "BloomModel", "OPTModel", "FalconModel"),
    *_cases(TEXT, "LlamaModel", "LlamaForCausalLM", "MistralModel", "Qwen2Model", "Qwen3Model"),
    *_cases(TEXT, "GemmaModel", "Gemma2Model", "Gemma3TextModel", "PhiModel", "Phi3Model"),
    *_cases(TEXT, "StableLmModel", "Starcoder2Model", "OlmoModel", "Olmo2Model", "CohereModel"),
    *_cases(TEXT, "GlmModel", "Glm4Model", "GraniteModel", "NemotronModel", "PersimmonModel"),
    *_cases(TEXT, "HeliumModel", "SmolLM3Model", "MptModel", "BioGptModel", "XGLMModel"),
    *_cases(TEXT, "MambaModel", "RwkvModel", "ArceeModel", "Ernie4_5Model", "SeedOssModel"),
    *_cases(TEXT, "ApertusModel"),
    *_cases(TEXT, "MixtralModel", "Qwen2MoeModel", "OlmoeModel", "GptOssModel"),
    *_cases(TEXT, "T5EncoderModel", "UMT5EncoderModel"),
    *_cases(SEQUENCES, "T5Model", "MT5Model", "BartModel", "MBartModel", "PegasusModel"),
    *_cases(SEQUENCES, "BlenderbotModel", "MarianModel", "M2M100Model", "LEDModel", "PLBartModel"),
    *_cases(SEQUENCES, "ProphetNetModel", "LongT5Model", "SwitchTransformersModel"),
    *_cases(IMAGES, "ViTModel", "DeiTModel", "BeitModel", "Dinov2Model", "ViTMAEModel"),
    *_cases(IMAGES, "CLIPVisionModel", "SiglipVisionModel", "IJepaModel", "ViTMSNModel"),
    *_cases(IMAGES, "PvtModel"),
    *_cases(IMAGES, "SegformerModel", "PoolFormerModel", "MobileViTModel", "FocalNetModel"),
    *_cases(IMAGES, "Dinov2WithRegistersModel", "DPTModel", "YolosModel"),
    *_cases(IMAGES, "YolosForObjectDetection"),
    *_cases(TEXT, "CLIPTextModel", "SiglipTextModel"),
    *_cases(PAIRS, "CLIPModel", "SiglipModel"),
    *_cases(SOUND, "Wav2Vec2Model", "HubertModel", "WavLMModel"),
    *_cases(
        "images of 64 × 64",
        *("timm:vit_tiny_patch16_224", "timm:mixer_s32_224", "timm:gmlp_s16_224"),
        *("timm:resmlp_12_224", "timm:eva02_tiny_patch14_224", "timm:deit3_small_patch16_224"),
        *("timm:swin_tiny_patch4_window7_224", "timm:convnext_atto", "timm:poolformer_s12"),
        *("timm:caformer_s18", "timm:mobilevit_xxs", "timm:efficientformer_l1"),
        *("timm:pvt_v2_b0", "timm:twins_svt_small", "timm:levit_128s", "timm:xcit_nano_12_p16_224"),
        *("timm:cait_xxs24_224", "timm:beit_base_patch16_224", "timm:maxvit_nano_rw_256"),
        *("timm:efficientnet_b0", "timm:resnet50", "timm:mobilenetv3_small_100"),
        *("timm:convnext_atto channels-last", "timm:poolformer_s12 channels-last"),
        *("timm:caformer_s18 channels-last", "timm:efficientformer_l1 channels-last"),
        *("timm:pvt_v2_b0 channels-last", "timm:mobilevit_xxs channels-last"),
    ),
)


def build(case: Case) -> tuple[Any, dict[str, Any]]:
    """The model of a case, in evaluation mode, and one batch."""
    import torch

    torch.manual_seed(0)
    if case.name.startswith("timm:"):
        import timm

        name, _, layout = case.name.removeprefix("timm:").partition(" ")
        model = timm.create_model(name, num_classes=10, **case.settings)
        size = model.default_cfg["input_size"][-1]
        x = torch.randn(2, 3, size, size)
        if layout == "channels-last":
            model, x = (t.to(memory_format=torch.channels_last) for t in (model, x))
        return model.eval(), {"x": x}
    import transformers

    model_class = getattr(transformers, case.name)
    model = model_class(small(model_class.config_class, case.settings)).eval()
    return model, batch(case.inputs)


def batch(inputs: str) -> dict[str, Any]:
    """Random tokens, images or sound."""
    import torch

    tokens = torch.randint(1, VOCABULARY, TOKENS)
    found: dict[str, Any] = {}
    if "input_ids" in inputs:
        found["input_ids"] = tokens
    if "decoder" in inputs:
        found["decoder_input_ids"] = tokens
    if "pixel_values" in inputs:
        found["pixel_values"] = torch.randn(2, 3, IMAGE_SIZE, IMAGE_SIZE)
    if "input_values" in inputs:
        found["input_values"] = torch.randn(2, 4000)
    return found


def small(configuration: Any, settings: Mapping[str, Any]) -> Any:
    """A configuration with few narrow layers."""
    usual = configuration()
    names = set(vars(usual)) | set(getattr(configuration, "attribute_map", {}))
    chosen = {name: value for name, value in _SMALL.items() if name in names}
    chosen = {
        n: v for n, v in chosen.items() if isinstance(getattr(usual, n, v), (int, type(None)))
    }
    for name, nested in getattr(configuration, "sub_configs", {}).items():
        if isinstance(getattr(usual, name, None), nested):
            chosen[name] = small(nested, {}).to_dict()
    return configuration(**{**chosen, **settings})


def sites_in_evaluation(case: Case) -> list[list[Any]]:
    """The sites of a model in evaluation, as :func:`examine` finds them; takes about a second."""
    import torch

    model, inputs = build(case)
    sites: list[Any] = []
    torch._dynamo.reset()
    torch.manual_seed(1)
    with torch.no_grad():
        backend = _reporting(sites, set(), storages(model))
        torch.compile(model.eval(), backend=backend)(**inputs)
    return [as_published(site) for site in sites]


def as_published(site: Any) -> list[Any]:
    """What is kept of a site: with the reason, if it could not be fused on any device."""
    return [site.form, site.activation, None if site.legal else site.reason]


def examine(case: Case) -> dict[str, Any]:
    """The sites of a model in both modes, and how far its results are from eager's."""
    model, inputs = build(case)
    return {
        "evaluation": _examine_mode(model.eval(), inputs, training=False),
        "training": _examine_mode(model.train(), inputs, training=True),
    }


def _examine_mode(model: Any, inputs: dict[str, Any], training: bool) -> dict[str, Any]:
    import torch

    sites: list[Any] = []
    reported: set[str] = set()

    def run(function: Callable[..., Any], batch: dict[str, Any] = inputs) -> list[Any]:
        torch.manual_seed(1)
        model.zero_grad()
        with torch.set_grad_enabled(training):
            results = list(tensors(function(**batch)))
            if training:
                sum(result.square().mean() for result in results).backward()  # type: ignore[union-attr]
        gradients = [parameter.grad for parameter in model.parameters()] if training else []
        return [*results, *(gradient for gradient in gradients if gradient is not None)]

    def compiled(backend: Any) -> list[Any]:
        torch._dynamo.reset()  # else what was compiled before counts against the recompile limit
        return run(torch.compile(model, backend=backend))

    names = storages(model)
    mine = compiled(_reporting(sites, reported, names))
    if any("seed of a dropout" in site.operands for site in sites):
        # Dropout that is fused draws other numbers than eager: compared is the model without it.
        with torch._inductor.config.patch(fallback_random=True):  # type: ignore[attr-defined]
            mine = compiled(_reporting([], set(), names))
    by_itself = compiled("eager")
    expected = run(model)
    # Of the forward pass alone, as a backward pass has products of its own.
    with torch.set_grad_enabled(training):
        joined = joined_layers(model, lambda: model(**inputs))
    found = {
        "sites": [as_published(site) for site in sites],
        "fused": sum(site.fused for site in sites),
        "joined": len(joined),
        "missed": sorted(joined - reported),
        "error": furthest(mine, expected),
        # Some classes are not the same under Dynamo alone (layer drop, for one).
        "error_unfused": furthest(by_itself, expected),
    }
    if found["error"] is not None and found["error"] > TOLERANCE:
        exact = _in_float64(model, inputs, run)
        found["error_float64"] = [furthest(results, exact) for results in (mine, expected)]
    return found


def _reporting(sites: list[Any], reported: set[str], names: Mapping[int, str]) -> Any:
    """A backend that notes the sites, and the weights of their last layers, of all it runs."""
    from fusion_backend import Options, fuse
    from fusion_backend.fusion.matching import find_matches
    from fusion_backend.patterns import FORMS

    def backend(graph: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        inputs = list(graph.graph.find_nodes(op="placeholder"))
        ends = [_origin(match.down.weight) for match in find_matches(graph.graph, FORMS)]
        positions = [inputs.index(end) for end in ends if end in inputs]
        result = fuse(graph, example_inputs, Options(policy="always"))

        def call(*arguments: Any) -> Any:
            sites.extend(result.sites)  # several layers may run through one compiled graph
            addresses = (arguments[i].untyped_storage().data_ptr() for i in positions)
            reported.update(names[address] for address in addresses if address in names)
            return result.graph_module(*arguments)

        return call

    return backend


def _origin(node: Any) -> Any:
    """The input of the graph of which a weight is a view."""
    while node.op != "placeholder" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _in_float64(model: Any, inputs: dict[str, Any], run: Callable[..., list[Any]]) -> list[Any]:
    import torch

    def double(value: Any) -> Any:
        return value.double() if value.is_floating_point() else value

    model.double()
    exact = run(model, {name: double(value) for name, value in inputs.items()})
    exact = [tensor.clone() for tensor in exact]
    model.to(torch.float32)
    return exact


def tensors(value: Any) -> Iterable[Any]:
    """The floating-point tensors of a model's result."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)


def furthest(mine: Sequence[Any], expected: Sequence[Any]) -> float | None:
    """The largest difference relative to each tensor's largest element; ``None``: other shapes."""
    if [t.shape for t in mine] != [t.shape for t in expected]:
        return None
    # Gradients that are zero but for rounding (of a bias before a norm, of keys' biases) have no
    # scale of their own.
    floor = 1e-3 * max((float(t.abs().max()) for t in expected if t.numel()), default=0.0)
    return max(
        (
            float((a - b).abs().max()) / max(float(b.abs().max()), floor, 1e-30)
            for a, b in zip(mine, expected, strict=True)
            if b.numel()
        ),
        default=0.0,
    )


def run_case(case: Case) -> dict[str, Any]:
    """:func:`examine` in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, __file__, "--one", case.name]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failure": f"more than {SECONDS} s"}
    if done.returncode != 0:
        return {"failure": (done.stderr.strip().splitlines() or ["?"])[-1][:200]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def page(results: Mapping[str, Any]) -> str:
    """docs/coverage.md."""
    models = {name: found for name, found in results["models"].items() if "failure" not in found}
    lines = [
        "# Coverage",
        "",
        f"fusedmlp was run on {len(models)} model classes of transformers "
        f"{results['transformers']} and timm {results['timm']}. They were built small, with random "
        f"weights, and run in float32 on a CPU with PyTorch {results['torch']} and the policy "
        "`always`, which fuses all that is legal. `python benchmarks/corpus.py` makes this page.",
        "",
        *(_summary(mode, models) for mode in ("evaluation", "training")),
        "",
        *_count(models),
        "A [site](glossary.md#site) is a place where pointwise work joins two linear layers. Each "
        "site is legal, so that a kernel may run it, or it carries a [reason](reasons.md). Whether "
        "a kernel runs it depends on the device: on this CPU oneDNN runs some in evaluation, and "
        "Inductor compiles the others. An error is the largest difference from eager, relative to "
        "the largest element of the result. In training it is the largest "
        "over results and gradients. A fused dropout draws other random numbers than eager does, "
        "so the error of such a model is measured with these sites left alone.",
        "",
        "| model | legal, evaluation | not | legal, training | not | activations | "
        "error, evaluation / training |",
        "|---|---|---|---|---|---|---|",
        *(_row(name, found) for name, found in models.items()),
    ]
    return "\n".join(lines) + "\n"


def _summary(mode: str, models: Mapping[str, Any]) -> str:
    sites = [site for found in models.values() for site in found[mode]["sites"]]
    legal = sum(reason is None for *_, reason in sites)
    fused = sum(found[mode]["fused"] for found in models.values())
    reasons = Counter(reason for *_, reason in sites if reason is not None)
    left = ", ".join(f"`{reason}` {count}" for reason, count in reasons.most_common())
    counts = f"{len(sites)} sites, {legal} legal, {fused} of them fused on this CPU"
    return f"- {mode}: {counts}; not legal: {left or 'none'}."


def _count(models: Mapping[str, Any]) -> Iterable[str]:
    """What the independent count says about those classes that were counted."""
    counted = [found for found in models.values() if "joined" in found["evaluation"]]
    if counted:
        runs = [found[mode] for found in counted for mode in ("evaluation", "training")]
        yield (
            "An independent program (`benchmarks/pointwise_joins.py`) watched eager runs of "
            f"{len(counted)} of the classes. It counted {sum(run['joined'] for run in runs)} "
            "linear layers that read pointwise work on other linear layers. For "
            f"{sum(len(run['missed']) for run in runs)} of them no site is reported."
        )
        yield ""


def _row(name: str, found: Mapping[str, Any]) -> str:
    cells = [f"`{name}`"]
    for mode in ("evaluation", "training"):
        sites = found[mode]["sites"]
        reasons = Counter(reason for *_, reason in sites if reason is not None)
        cells.append(str(sum(reason is None for *_, reason in sites)))
        cells.append(", ".join(f"`{r}` {n}" for r, n in sorted(reasons.items())) or "–")
    activations = {
        activation: None
        for mode in ("evaluation", "training")
        for _, activation, reason in found[mode]["sites"]
        if reason is None
    }
    cells.append(", ".join(f"`{activation}`" for activation in activations) or "–")
    cells.append(" / ".join(map(_error, (found["evaluation"], found["training"]))))
    return f"| {' | '.join(cells)} |"


def _error(found: Mapping[str, Any]) -> str:
    error, unfused = found["error"], found["error_unfused"]
    if error is None:
        return "other sizes each time"
    if unfused is not None and unfused > TOLERANCE:
        return "differs without fusion too"  # chance, such as in masks that NumPy draws
    if "error_float64" in found:
        mine, eager = found["error_float64"]
        return f"{error:.0e} (from float64: {mine:.0e}, eager {eager:.0e})"
    return f"{error:.0e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--models", default="", help="beginnings of names, with commas between")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default 2)")
    parser.add_argument("--page", action="store_true", help="write docs/coverage.md, run nothing")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        (case,) = (case for case in CASES if case.name == options.one)
        print(json.dumps(examine(case)))
        return 0
    if not options.page:
        run_cases(tuple(options.models.split(",")), options.jobs)
    PAGE.write_text(page(json.loads(RESULTS.read_text())))
    return 0


def run_cases(beginnings: tuple[str, ...], jobs: int) -> None:
    """Run those cases and write the results of each as it ends."""
    import timm
    import torch
    import transformers

    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"models": {}}
    results |= {m.__name__: m.__version__ for m in (torch, transformers, timm)}
    chosen = [case for case in CASES if case.name.startswith(beginnings)]
    with ThreadPoolExecutor(jobs) as pool:
        for case, found in zip(chosen, pool.map(run_case, chosen), strict=True):
            results["models"][case.name] = found
            order = {case.name: i for i, case in enumerate(CASES)}
            results["models"] = dict(sorted(results["models"].items(), key=lambda m: order[m[0]]))
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            print(case.name, outcome(found), flush=True)


def outcome(found: Mapping[str, Any]) -> str:
    """One line about a case."""
    if "failure" in found:
        return f"failed: {found['failure']}"
    text = []
    for mode in ("evaluation", "training"):
        reasons = Counter(str(reason or "legal") for *_, reason in found[mode]["sites"])
        error, unfused = found[mode]["error"], found[mode]["error_unfused"]
        wrong = error is None or error > max(TOLERANCE, 2 * (unfused or 0.0))
        mine, eager = found[mode].get("error_float64", (0.0, 0.0))
        wrong = wrong and not 0.0 < mine <= 2 * eager  # else the model blows rounding up
        line = f"{mode} {dict(reasons)} error {error}{' WRONG' if wrong else ''} ({unfused})"
        text.append(f"{line}, missed {found[mode]['missed']}")
    return "; ".join(text)


if __name__ == "__main__":
    sys.exit(main())
