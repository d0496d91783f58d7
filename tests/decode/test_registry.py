"""A decoder is one file of common/decode and one row of the table."""

import subprocess
import sys

import pytest
import tiny_chat

from common.decode.registry import family
from common.decoders import DECODERS

# Emits the likeliest token twice per step of two rows: a text that no other decoder gives.
TOY = """
import numpy as np

from common.decode.requests import Choose, Emit, Read, Rows
from common.errors import UsageError
from common.step import Step


def check(options, model, sampler):
    if not sampler.is_argmax:
        raise UsageError("spec toy needs greedy decoding")


def decode(run):
    token = yield Choose(run.logits, run.sampler)
    while run.state.length + 2 <= run.state.capacity:
        (values,) = yield Read((token,))
        for _ in range(2):
            yield Emit(int(values[-1]), run.logits)
        run.stats.lengths[2] += 1
        run.stats.rows += 2
        step = Step.chain(np.repeat(values[-1:], 2), run.state.length)
        token = (yield Rows(step, run.sampler, sampled=slice(1, 2))).sampled
        run.state.commit(np.arange(2))
"""

USE = """
import sys

from common import decode, decoders

decode.__path__.append(sys.argv[1])
decoders.DECODERS["toy"] = decoders.Decoder("toy", "each token twice", "toy", takes=("tree_budget",))

import generate
from generate.__main__ import main

assert "common.decode.toy" not in sys.modules
with generate.load(sys.argv[2], backend="numpy") as llm:
    plain = llm.generate("hello", max_tokens=1).tokens
    reply = llm.generate("hello", max_tokens=8, spec="toy")
assert reply.tokens[:2] == plain * 2, reply.tokens
assert reply.tokens[::2] == reply.tokens[1::2], reply.tokens
assert reply.stats.accepted.length == 2
flags = ["-m", sys.argv[2], "--backend", "numpy", "-p", "hello", "-n", "8", "--temperature"]
assert main([*flags, "0", "--spec", "toy", "--stats"]) == 0
assert main([*flags, "1", "--spec", "toy"]) == 2
assert main([*flags, "0", "--spec", "toys"]) == 2
main(["--help"])
"""


@pytest.mark.parametrize("name", DECODERS)
def test_each_row_has_its_module(name):
    assert callable(family(DECODERS[name].family).decode)


def test_a_further_decoder_is_a_file_and_a_row(tmp_path):
    """Its name, help text, check and statistics follow from the row, from which its file is found."""
    (tmp_path / "toy.py").write_text(TOY)
    model = tiny_chat.write(tmp_path / "model")
    run = [sys.executable, "-c", USE, str(tmp_path), str(model)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "toy: each token twice" in " ".join(done.stdout.split())
    assert "2.00 tokens per step of 2.0 rows" in done.stderr
    assert "spec toy needs greedy decoding" in done.stderr
    assert "invalid choice: 'toys'" in done.stderr
