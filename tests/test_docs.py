"""The Python in README and docs runs as it stands there, block after block, on a small model (and on the CPU)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STARTS_PROCESSES = re.compile(r"^launch\(.*$", re.MULTILINE)

NAMES = """
import torch
from torch import nn

from recals_exp.pipeline import draw_timeline, record
from recals_exp.recals import recals_with_rngs

torch.manual_seed(0)


class Net(nn.Sequential):
    def forward(self, x, labels=None):
        return super().forward(x)


def parts():
    return [layer for _ in range(8) for layer in (nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Tanh())]


model = Net(*parts())
front, back = nn.Sequential(*parts()[:16]), nn.Sequential(*parts()[16:])
x, y = torch.randn(256, 64), torch.randn(256, 64)
batches = [(x, y)]
loss_fn = nn.functional.mse_loss
"""

DEVICES = [('"cuda:0"', '"cpu"'), ('"cuda:1"', '"cpu"'), ("pipe.append(back, 1,", 'pipe.append(back, "cpu",')]


def scripts_of(path: str) -> list[str]:
    """The blocks one after the other; one that starts processes is a script of its own, as they run it, too."""
    together, alone = [], []
    for block in BLOCK.findall((ROOT / path).read_text(encoding="utf-8")):
        for device, here in DEVICES:
            block = block.replace(device, here)
        if STARTS_PROCESSES.search(block):
            alone.append(STARTS_PROCESSES.sub(r"if __name__ == '__main__':\n    \g<0>", block))
        else:
            together.append(block)
    return ["\n".join(together), *alone]


@pytest.mark.parametrize(
    "path", ["README.md", "docs/pipeline.md", pytest.param("docs/policies.md", marks=pytest.mark.slow)]
)
def test_the_python_in_the_docs_runs(path: str, tmp_path: Path) -> None:
    for number, code in enumerate(scripts_of(path)):
        script = tmp_path / f"documented_{number}.py"
        script.write_text(NAMES + code, encoding="utf-8")
        ran = subprocess.run(
            [sys.executable, str(script)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},  # this tree's, whatever is installed
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ran.returncode == 0, ran.stderr[-3000:]


def test_every_document_with_python_is_run() -> None:
    found = {
        path.name for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")) if BLOCK.search(path.read_text("utf-8"))
    }
    assert found == {"README.md", "pipeline.md", "policies.md"}
