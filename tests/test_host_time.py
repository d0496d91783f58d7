"""The measurement of the host's time per step runs, with and without the CUDA backend."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("flags", ["", "--cuda", "--cuda --temperature 0.8", "--cuda --text", "--cuda --spec wedlm"])
@pytest.mark.few(1)
def test_it_prints_microseconds_per_step(flags):
    """CuPy's place is taken by what launches nothing, so neither CuPy nor a GPU is needed."""
    command = [sys.executable, "tests/host_time.py", "2", "--steps", "5", *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert re.match(r"2 streams: \d+ us per step of [26]\.0 tokens\n", done.stdout), done.stderr


DECODING = """
import free_cuda
import host_time

from common.options import GenerationOptions

host_time.WARM = 4
model = host_time.cuda_model("{shape}:q4_k_m", "off")
from cuda_backend.products import EXPAND

engine = host_time.begun(model, {streams}, GenerationOptions(spec="off", temperature=0.8, top_k=40))
host_time.turns(engine, 2)
beside = free_cuda.held["all"] - free_cuda.held["out_of_arena"]
free_cuda.peaks.clear()
host_time.turns(engine, 5)
print(free_cuda.peaks["all"] - beside, model.ops.logits_bytes(model.config.vocab, {streams}))
print(model.ops.context.arena.passing.nbytes, 2 * EXPAND)
"""


@pytest.mark.parametrize(("shape", "streams"), [("qwen3.6-27b", 64), ("wedlm-8b", 3)])
@pytest.mark.long
def test_memory_of_several_sequences_that_sample(shape, streams):
    """Logits and draws take what is predicted; weights of draws have room in the memory for expanded matrices."""
    command = [sys.executable, "-c", DECODING.format(shape=shape, streams=streams)]
    path = f"{ROOT}:{ROOT / 'tests'}"
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": path})
    assert not done.returncode, done.stderr
    taken, predicted, drawing, expanded = map(int, done.stdout.split())
    assert taken <= predicted <= 1.03 * taken
    assert 0 < drawing <= expanded


FILLING = """
import host_time

from common.fit import layer_size
from common.options import GenerationOptions

model = host_time.cuda_model("{shape}:q4_k_m", "off")
from cuda_backend.sizes import sums_bytes  # once CuPy's place is taken

arena = model.ops.context.arena
spec = model.state_spec
sizes = [layer_size(table, states, model.config) for table, states in zip(model.layout.layers, spec, strict=True)]
host_time.begun(model, {streams}, GenerationOptions(spec="off"))
print(sum(chunk.nbytes for chunk in arena.parts[3]), sums_bytes(sizes, host_time.CONTEXT, {streams}))
print(arena.nbytes, model.ops.work_bytes(sizes, host_time.CONTEXT, 1024))
"""


@pytest.mark.parametrize(("shape", "streams"), [("wedlm-8b", 64), ("qwen3.6-27b", 20), ("glm-4.7-flash", 16)])
@pytest.mark.long
def test_memory_of_a_pool_that_fills_up(shape, streams):
    """Attention's sums take one chunk, as predicted, while the rows of a step grow from one bucket to the next."""
    command = [sys.executable, "-c", FILLING.format(shape=shape, streams=streams)]
    path = f"{ROOT}:{ROOT / 'tests'}"
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": path})
    assert not done.returncode, done.stderr
    taken, predicted, arena, work = map(int, done.stdout.split())
    assert taken <= predicted <= 1.03 * taken
    assert arena <= work + predicted
