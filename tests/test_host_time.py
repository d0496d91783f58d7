"""The measurement of the host's time per step runs, with and without the CUDA backend."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("flags", ["", "--cuda", "--cuda --spec wedlm"])
def test_it_prints_microseconds_per_step(flags):
    """CuPy's place is taken by what launches nothing, so neither CuPy nor a GPU is needed."""
    command = [sys.executable, "tests/host_time.py", "2", "--steps", "5", *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert re.match(r"2 streams: \d+ us per step of [26]\.0 tokens\n", done.stdout), done.stderr
