"""A mixture on a disk, made by examples/stream_experts.py: memory stays within the budget."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENV = os.environ | {"PYTHONPATH": str(ROOT)}
CONSTANT = (
    400_000_000  # bytes beside slots: the interpreter, MLX, other weights (0.15 GB), work, buffers of the threads
)


@pytest.mark.long
def test_the_script_runs(tmp_path):
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    script, folder = [sys.executable, "examples/stream_experts.py"], str(tmp_path / "mixture")
    subprocess.run([*script, "make", folder, "--sparse-layers", "2", "--experts", "8"], cwd=ROOT, env=ENV, check=True)
    measure = [*script, "measure", folder, "--cache", "17MB", "--tokens", "2"]
    figures = json.loads(subprocess.run(measure, cwd=ROOT, env=ENV, check=True, capture_output=True, text=True).stdout)
    assert figures["tokens"] == 64 + 2
    assert figures["share_of_plain"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_memory_stays_within_the_budget(tmp_path, packed):
    """Slots of 0.25 GB over experts of 0.9 GB, while RLIMIT_DATA forbids to hold them all.

    No timing decides: the share of plain reads that the script prints is in docs/experts.md.
    """
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    script, folder = [sys.executable, "examples/stream_experts.py"], str(tmp_path / "mixture")
    subprocess.run([*script, "make", folder, "--sparse-layers", "4", "--experts", "128"], cwd=ROOT, env=ENV, check=True)
    more = []
    if packed:
        pack = str(tmp_path / "pack")
        subprocess.run([sys.executable, "-m", "generate", "pack", folder, pack], cwd=ROOT, env=ENV, check=True)
        more = ["--pack", pack]
    limited = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_DATA, (10**9, 10**9)); "
    limited += "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    measure = [sys.executable, "-c", limited, script[1], "measure", folder, "--cache", "0.27GB", "--tokens", "8", *more]
    out = subprocess.run(measure, cwd=ROOT, env=ENV, check=True, capture_output=True, text=True).stdout
    figures = json.loads(out)
    assert figures["gb_read"] > 0.1
    assert figures["peak_over_slots_gb"] * 1e9 < CONSTANT
    assert figures["slots_gb"] <= 0.27
