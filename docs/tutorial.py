"""Run the code of docs/tutorial.md, and write what each block prints below it.

python docs/tutorial.py

Outputs of a CPU and of a GPU stand beside each other: a run replaces those of its own kind.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import torch

PAGE = Path(__file__).with_suffix(".md")
#: A block of code, and what stands between it and the next text: the place of its outputs.
BLOCK = re.compile(
    r"```python\n(?P<code>.*?)```\n"
    r"(?P<rest>\n<!-- output -->\n(?P<outputs>(?:\n[^\n]+:\n\n```\n.*?```\n)*))?",
    re.DOTALL,
)
OUTPUT = re.compile(r"\n(?P<where>[^\n]+):\n\n```\n(?P<text>.*?)```\n", re.DOTALL)


def written(text: str, where: str) -> str:
    """The text with what its blocks print, where there is a place for it, on a machine."""
    scope: dict[str, object] = {"__name__": "tutorial"}

    def with_output(found: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(found["code"], str(PAGE), "exec"), scope)
        if found["rest"] is None:
            return found[0]
        outputs = {each["where"]: each["text"] for each in OUTPUT.finditer(found["outputs"])}
        outputs[where] = printed.getvalue()
        texts = [f"\n{name}:\n\n```\n{text}```\n" for name, text in outputs.items()]
        return f"```python\n{found['code']}```\n\n<!-- output -->\n{''.join(texts)}"

    return BLOCK.sub(with_output, text)


def main() -> None:
    """Write the page anew, with the outputs of this machine."""
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    PAGE.write_text(written(PAGE.read_text(), where))


if __name__ == "__main__":
    main()
