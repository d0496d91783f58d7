"""The demo model gives the same text with its draft and without, over many prompts.

On NumPy and CUDA a row's result does not depend on its neighbours, and no text differs. MLX sums a step's rows in
another order than a single row's, so that a text may differ where two tokens have nearly equal logits; every
difference must be such a place.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from test_plain import prefilled

from common.checkpoint import open_checkpoint
from common.decode.alone import run_alone
from common.decode.run import DecoderRun, DecodeStats
from common.decoders import Speculation
from common.demo import demo_path
from common.models import load_model
from common.models.drafts import load_pair
from common.reference import NumpyOps
from common.sampling import Sampler, Sampling
from common.tokenizer import load_tokenizer

PROMPTS = [json.loads(line)["prompt"] for line in (Path(__file__).parents[1] / "data" / "prompts.jsonl").open()]
NEAR_TIE = 1e-3  # of logits of about 20
KINDS = ("chain", "tree", "lookup+tree")


def texts(model, prompts, new, speculation=None, accepted=None, with_margins=False):
    """Greedy continuations of `new` tokens, and on request the margin of each choice."""
    out = []
    for prompt in prompts:
        state, logits = prefilled(model, prompt, len(prompt) + new)
        sampler = Sampler(Sampling())
        if speculation is None:
            tokens = run_alone(DecoderRun(model, state, logits, sampler))
        else:
            tokens = run_alone(DecoderRun(model, state, logits, sampler, prompt, speculation, None, accepted))
        chosen, margins = [], []
        for token, row in tokens:
            chosen.append(token)
            if with_margins:
                best = np.sort(model.ops.read(row)[-1])
                margins.append(best[-1] - best[-2])
            if len(chosen) == new:
                break
        tokens.close()
        out.append((chosen, margins))
    return out


def differences(ops, prompts, new, kinds, least_length, with_margins=True):
    """Where texts differ from the plain ones, by mode: margins of the plain choices there, or their positions."""
    checkpoint = open_checkpoint(demo_path())
    target, tokenizer = load_model(checkpoint, ops), load_tokenizer(checkpoint.path, checkpoint.config)
    pair, prompts = load_pair(demo_path("draft"), target), [tokenizer.encode(prompt) for prompt in prompts]
    expected, found = texts(target, prompts, new, with_margins=with_margins), {}
    for kind in kinds:
        accepted = DecodeStats()
        drafted = texts(pair, prompts, new, Speculation(kind, 31), accepted)
        found[kind] = []
        for (tokens, margins), (other, _) in zip(expected, drafted, strict=True):
            places = [i for i in range(new) if tokens[i] != other[i]][:1]
            found[kind] += [margins[i] if with_margins else i for i in places]
        print(f"{kind}: {len(found[kind])} of {len(prompts)} texts differ, {accepted.length:.2f} tokens per step")
        assert accepted.length > least_length
    return found


def test_a_few_tokens():
    assert differences(NumpyOps(), PROMPTS[:1], 8, ["tree"], 0.9) == {"tree": []}


@pytest.mark.slow
def test_numpy():
    found = differences(NumpyOps(), PROMPTS[::4], 128, KINDS, 1.5)
    assert not any(found.values()), found


@pytest.mark.slow
def test_mlx():
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    from mlx_backend.ops import MlxOps

    found = differences(MlxOps(), PROMPTS[::4], 128, KINDS, 1.5)
    assert all(margin < NEAR_TIE for margins in found.values() for margin in margins), found
    assert sum(map(len, found.values())) < 5, found


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_few_tokens_on_cuda(kind):
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from cuda_backend.ops import CudaOps

    assert differences(CudaOps(), PROMPTS[:1], 8, [kind], 0.9, with_margins=False) == {kind: []}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lookup", *KINDS, "lookup+chain"])
def test_cuda(kind):
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from cuda_backend.ops import CudaOps

    found = differences(CudaOps(), PROMPTS, 256, [kind], 1.2, with_margins=False)
    assert not any(found.values()), found
