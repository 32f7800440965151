"""The `fusedmlp` command: demo, explain, profile, report, bench, tune and doctor.

Exit codes: 0, all is well; 1, the model or the machine failed; 2, the command line is wrong. A
failure prints one line on stderr, and with `--traceback` the traceback as well.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import fusion_backend
from fusion_backend.cli.quiet import quiet_libraries, set_log_levels
from fusion_backend.errors import CommandError
from fusion_backend.options import nearest

LONGEST_MESSAGE = 500


Commands = argparse._SubParsersAction  # argparse has no public name for it


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, like all others of this command."""

    def error(self, message: str) -> NoReturn:
        """Print the message, with what may have been meant, and leave with code 2."""
        hint = self._nearest(message)
        print(f"fusedmlp: error: {message}{hint} (see `{self.prog} --help`)", file=sys.stderr)
        sys.exit(2)

    def _nearest(self, message: str) -> str:
        """For a choice or a flag that there is not, the nearest one that there is."""
        if found := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            return nearest(found[1], [name.strip("' ") for name in found[2].split(",")])
        if found := re.match(r"unrecognized arguments: (--[\w-]+)", message):
            commands = next((a for a in self._actions if isinstance(a, Commands)), None)
            parsers = {} if commands is None else commands.choices
            if having := [name for name, each in parsers.items() if found[1] in each.flags()]:
                if len(having) == len(parsers):
                    return f" ({found[1]} stands after the command)"
                return f" ({found[1]} is an option of {' and '.join(having)}, behind its name)"
            flags = {flag for each in (self, *parsers.values()) for flag in each.flags()}
            return nearest(found[1], flags)
        return ""

    def flags(self) -> list[str]:
        """All flags of this command."""
        return [flag for action in self._actions for flag in action.option_strings]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit code."""
    arguments = build_parser().parse_args(argv)
    set_log_levels()
    try:
        # Imported only now: `--help` and `--version` answer without waiting for torch.
        command = importlib.import_module(f"fusion_backend.cli.{arguments.command}")
        with quiet_libraries():
            code: int = command.run(arguments)
        return code
    except KeyboardInterrupt:
        print(f"fusedmlp: interrupted{how_to_go_on(arguments)}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if arguments.traceback:
            traceback.print_exc()
        print(f"fusedmlp: error: {one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, CommandError) else 1


def how_to_go_on(arguments: argparse.Namespace) -> str:
    """What becomes of the part of a command that was done before it was interrupted."""
    if arguments.command == "tune" or (arguments.command == "bench" and arguments.out):
        return "; what was measured is kept, and the same command goes on"
    if arguments.command == "bench":
        return "; nothing was kept: with --out FILE the same command would go on"
    return "; nothing was kept: the same command begins again"


def one_line(error: BaseException) -> str:
    """The error's message without line breaks, led by its type unless it is one of our own."""
    text = " ".join(str(error).split())
    if not isinstance(error, fusion_backend.FusedMLPError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= LONGEST_MESSAGE else text[:LONGEST_MESSAGE] + " …"


def build_parser() -> argparse.ArgumentParser:
    """The command line of `fusedmlp`."""
    parser = Parser(prog="fusedmlp", description="Fuse the MLPs of PyTorch models.")
    parser.add_argument(
        "--version", action="version", version=f"fusedmlp {fusion_backend.__version__}"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_demo(commands)
    add_explain(commands)
    add_profile(commands)
    add_report(commands)
    add_bench(commands)
    add_tune(commands)
    add_doctor(commands)
    return parser


def add_demo(commands: Commands[Parser]) -> None:
    """`fusedmlp demo`."""
    demo = commands.add_parser("demo", help="fuse real models on this machine and measure them")
    demo.add_argument(
        "--model",
        action="append",
        metavar="NAME",
        help="only models whose name contains NAME; may be repeated",
    )
    add_device(demo)
    add_common(demo)


def add_explain(commands: Commands[Parser]) -> None:
    """`fusedmlp explain`."""
    explain = commands.add_parser(
        "explain", help="report every MLP of a model: fused on which plan, or left alone and why"
    )
    add_model(explain, "meta")
    explain.add_argument(
        "--target",
        metavar="GPU",
        help="plan for a GPU that need not be in this machine: h100, a100, sm_90, …",
    )
    explain.add_argument(
        "--graph", action="store_true", help="print the FX graphs before and after the rewrite"
    )
    add_common(explain)


def add_profile(commands: Commands[Parser]) -> None:
    """`fusedmlp profile`."""
    profile = commands.add_parser(
        "profile", help="compare eager, Inductor and fusedmlp: kernels, times, numerical error"
    )
    add_model(profile)
    profile.add_argument(
        "--changes",
        action="store_true",
        help="also list each kernel: how often Inductor and fusedmlp run it, and for how long",
    )
    profile.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write one step of each backend for ui.perfetto.dev (FILE.json.gz)",
    )
    add_common(profile)


def add_report(commands: Commands[Parser]) -> None:
    """`fusedmlp report`."""
    report = commands.add_parser(
        "report",
        help="write what became of a model's MLPs, and what it gained, as one HTML file",
        description="The file has every MLP, the graph before and after, generated kernels, "
        "timelines, a roofline and memory. It loads nothing from elsewhere.",
    )
    add_model(report, "meta")
    report.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), metavar="FILE",
        help="the file to write (default: report.html)",
    )  # fmt: skip
    report.add_argument(
        "--target",
        metavar="GPU",
        help="plan and compile for a GPU that need not be in this machine; nothing is measured",
    )
    report.add_argument("--no-profile", action="store_true", help="measure nothing")
    report.add_argument("--traceback", action="store_true", help="show the traceback of an error")


def add_bench(commands: Commands[Parser]) -> None:
    """`fusedmlp bench`."""
    bench = commands.add_parser(
        "bench",
        help="measure MLPs under eager, Inductor, libraries and fusedmlp, side by side",
        description="Without a shape or a model, the published grids: all of the GPU's, or the "
        "CPU's. A run with --out that was cut short is continued by the same command.",
    )
    add_cells(bench)
    bench.add_argument("--peers", metavar="A,B,…", help="only these; fusedmlp:PLAN is one plan")
    bench.add_argument(
        "--without",
        metavar="A,B,…",
        help="not these: a run without max-autotune is short, and the same command without this "
        "measures the cells again, with it",
    )
    bench.add_argument("--out", type=Path, metavar="FILE", help="results (JSON), continued")
    bench.add_argument("--plots", type=Path, metavar="DIR", help="write PNGs (needs matplotlib)")
    bench.add_argument(
        "--seconds", type=float, default=float("inf"), help="start no cell after this long"
    )
    bench.add_argument(
        "--jobs",
        type=int,
        default=0,
        help="processes that compile cells before they are measured (0)",
    )
    bench.add_argument("--rounds", type=positive, default=10, help="samples a peer and cell (10)")
    add_device(bench)
    add_common(bench)


def add_cells(parser: Parser) -> None:
    """The arguments that say which MLPs."""
    parser.add_argument(
        "--grid",
        action="append",
        choices=("forward", "half", "single", "bias-free", "cpu"),
        help="a published grid; may be repeated",
    )
    parser.add_argument(
        "--random", type=int, metavar="N", help="N MLPs drawn at random: sizes, forms, biases"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of --random (default: 0)")
    parser.add_argument(
        "--form",
        action="append",
        help="gelu_tanh (default), gelu, relu, silu, swiglu, geglu, geglu_tanh, reglu, or an "
        "expression such as 'silu(g) * u'; may be repeated",
    )
    parser.add_argument("--rows", type=numbers, metavar="N,N,…", help="numbers of rows")
    parser.add_argument("--width", type=int, metavar="N", help="width of the input")
    parser.add_argument("--hidden", type=int, metavar="N", help="default: four times the width")
    parser.add_argument("--out-width", type=int, metavar="N", help="default: that of the input")
    parser.add_argument(
        "--bias",
        action=argparse.BooleanOptionalAction,
        help="biases in all layers (default: where the MLP is not gated)",
    )
    parser.add_argument(
        "--model", metavar="package.module:factory", help="the MLPs of a model, as in `explain`"
    )
    parser.add_argument(
        "--dtype",
        action="append",
        choices=("bfloat16", "float16", "tf32", "float32"),
        help="instead of the grid's or bfloat16 (CPU: float32); may be repeated",
    )
    parser.add_argument("--only", metavar="TEXT", help="only cells with TEXT in their name")


def add_tune(commands: Commands[Parser]) -> None:
    """`fusedmlp tune`."""
    tune = commands.add_parser(
        "tune",
        help="measure every plan against Inductor on this machine, for the default policy to "
        "choose by",
        description="Without --model or sizes, a grid of MLPs is measured; on a CPU, rates follow "
        "from it by which other MLPs are planned. Each result is written at once: the same command "
        "continues what was interrupted.",
    )
    tune.add_argument(
        "--model",
        dest="factory",
        metavar="package.module:factory",
        help="measure the MLPs of a model; a function as for `fusedmlp explain`",
    )
    tune.add_argument(
        "--quick",
        action="store_true",
        help="measure two dozen MLPs in two minutes, and fit the cost model to this GPU; on a CPU, "
        "repeat the calibration for a minute",
    )
    tune.add_argument("--form", choices=("gelu_tanh", "gelu", "swiglu"), help="of MLPs of sizes:")
    tune.add_argument("--rows", type=numbers, metavar="N,N,…", help="numbers of rows")
    tune.add_argument("--width", type=int, help="input and output width")
    tune.add_argument("--hidden", type=int, help="width between the layers")
    tune.add_argument(
        "--max-autotune",
        action="store_true",
        help="measure Inductor's max-autotune as well, on a GPU",
    )
    tune.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write a GPU's table to a file, not to the cache directory",
    )
    tune.add_argument(
        "--seconds",
        type=float,
        help="start no measurement after this long; no limit, with --quick 120, on a CPU 60",
    )
    tune.add_argument(
        "--again", action="store_true", help="measure also what the table has already"
    )
    add_device(tune)
    add_dtype(tune)
    add_backward(tune)
    add_common(tune)


def positive(text: str) -> int:
    """A whole number from one on, for an option."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {number}")
    return number


def numbers(text: str) -> tuple[int, ...]:
    """Positive integers, separated by commas."""
    found = tuple(int(number) for number in text.split(","))
    if min(found) < 1:
        raise ValueError(text)
    return found


def add_doctor(commands: Commands[Parser]) -> None:
    """`fusedmlp doctor`."""
    doctor = commands.add_parser("doctor", help="report what works on this machine and why not")
    doctor.add_argument(
        "--quick", action="store_true", help="look only; do not compile a small MLP as a trial"
    )
    add_common(doctor)


def add_model(parser: Parser, *devices: str) -> None:
    """The arguments that say which model, and how it is run, on these devices, too."""
    parser.add_argument(
        "factory",
        metavar="package.module:factory",
        help="a function without arguments that returns (model, args) or (model, args, kwargs); "
        "path/to/file.py:factory also works",
    )
    add_device(parser, *devices)
    add_dtype(parser)
    parser.add_argument(
        "--policy",
        choices=("auto", "always", "never"),
        type=str.lower,
        help="auto: fuse what is legal and not slower (default); always: all that is legal; "
        "never: nothing",
    )
    parser.add_argument(
        "--exclude",
        metavar="PATHS",
        help="leave the MLPs of these modules alone: blocks.0.mlp,head* (as the report names them)",
    )
    parser.add_argument(
        "--disable-forms", metavar="NAMES", help="fuse nothing of these forms: gated,chain"
    )
    add_backward(parser)


def add_dtype(parser: Parser) -> None:
    """`--dtype`."""
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        type=str.lower,
        help="convert the model and its floating-point inputs (default: as the factory made them)",
    )


def add_backward(parser: Parser) -> None:
    """`--backward`."""
    parser.add_argument(
        "--backward", action="store_true", help="a training step: forward and backward"
    )


def add_device(parser: Parser, *others: str) -> None:
    """`--device`: cpu, cuda or others."""
    without_memory = "; meta: nowhere, with --target, and weights take no memory"
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda", *others),
        help="where to run (default: a GPU if there is one)" + without_memory * ("meta" in others),
    )


def add_common(parser: Parser) -> None:
    """What every command takes."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
