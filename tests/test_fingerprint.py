"""What compile caches are keyed on, and that they accept graphs with the operators."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import fusion_backend
from fusion_backend import compat
from fusion_backend.fingerprint import hash_of, kernels_hash, source_hash

ROOT = Path(fusion_backend.__file__).parents[1]

COMPILE = """
import torch, fusion_backend.operators
from torch._dynamo.utils import counters

def mlp(plan):
    call = lambda x, up, down: torch.ops.fusedmlp.mlp(
        x, None, None, up, None, down, None, [], "gelu(x)", plan
    )
    return torch.compile(call, fullgraph=True)

x = torch.randn(4, 32)
up, down = (torch.randn(*shape, requires_grad=True) for shape in ((64, 32), (32, 64)))
mlp("reference")(x, up, down).sum().backward()
with torch.no_grad():
    mlp("onednn")(x, up, down)
print(*(counters["aot_autograd"]["autograd_cache_" + name] for name in ("hit", "miss", "bypass")))
"""
HAS_TRITON = "import sys, {modules}; print('triton' in sys.modules)"


BACKEND = """
import torch, fusion_backend
from torch._dynamo.utils import counters

layers = torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)
with torch.no_grad():
    torch.compile(torch.nn.Sequential(*layers), backend=fusion_backend.fusedmlp)(torch.ones(4, 32))
print(*(counters["aot_autograd"]["autograd_cache_" + name] for name in ("hit", "miss", "bypass")))
"""


def run(script, **environment):
    """What a script prints in a process of its own."""
    process = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def test_a_second_process_takes_the_compiled_graphs_from_the_cache(tmp_path):
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    assert [run(COMPILE, **cache) for _ in range(2)] == ["0 2 0", "2 0 0"]


def test_a_plan_is_part_of_the_key(tmp_path):
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    policies = ("never", "always", "always", "never")
    found = [run(BACKEND, FUSEDMLP_POLICY=policy, **cache) for policy in policies]
    assert found == ["0 1 0", "0 1 0", "1 0 0", "1 0 0"]


def test_the_kernels_hash_follows_what_decides_how_fast_a_plan_is():
    package = Path(fusion_backend.__file__).parent
    names = ("kernels", "dispatch.py", "gradients.py", "library.py")
    assert all((package / name).exists() for name in names)
    assert kernels_hash() == hash_of("", [package / name for name in names])
    assert len({kernels_hash(), source_hash(), hash_of("", [package / names[0]])}) == 3


def test_importing_the_operators_imports_no_triton():
    torch_alone = HAS_TRITON.format(modules="torch._subclasses.functional_tensor")
    assert run(HAS_TRITON.format(modules="fusion_backend.operators")) == run(torch_alone)


def test_the_source_hash_follows_contents_and_names_but_not_the_place(tmp_path):
    package = tmp_path / "fusion_backend"
    ignored = shutil.ignore_patterns("__pycache__", "patterns")
    shutil.copytree(ROOT / "fusion_backend", package, ignore=ignored)
    first = hash_of("1", [package])
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "operators.pyc").touch()
    moved = package.rename(tmp_path / "elsewhere")
    assert hash_of("1", [moved.rename(package)]) == first
    assert hash_of("2", [package]) != first
    file = package / "kernels" / "__init__.py"
    file.write_text(file.read_text() + "\n")
    second = hash_of("1", [package])
    file.rename(package / "kernels" / "other.py")
    assert len({first, second, hash_of("1", [package])}) == 3


def test_the_source_hash_covers_patterns_and_has_256_bits():
    assert len(bytes.fromhex(source_hash())) == 32
    alone = hash_of(fusion_backend.__version__, [Path(fusion_backend.__file__).parent])
    assert source_hash() != alone


def test_kernels_are_autotuned_under_the_users_tag_and_graphs_cached_under_ours():
    from torch._inductor.runtime.autotune_cache import AutotuneCache
    from torch.compiler import config

    with config.patch(cache_key_tag="users"):
        key, before = AutotuneCache._prepare_key("kernel.py"), AutotuneCache._prepare_key
        with compat.cache_tag("ours"):
            assert config.cache_key_tag.startswith("usersours")
            assert AutotuneCache._prepare_key("kernel.py") == key
            assert config.cache_key_tag.startswith("usersours")
        assert AutotuneCache._prepare_key is before
    assert AutotuneCache._prepare_key("kernel.py") != key
