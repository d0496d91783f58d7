"""Every model on every backend against what transformers computed, over 512 positions, however the prompt is cut.

Two float32 programs differ by about 1e-5 in a logit, and by ten times that in a Qwen3.5, where a q or k head close to
zero is normalized to length 1; a float64 run of NumpyOps differs from either by as much. The quietest known mistake
(tests/models/test_traps.py) is more than twice the tolerance.
"""

import numpy as np
import pytest
import tiny
from gguf_files import write_gguf

from common.models import load_model

LOGIT = {"llama": 1e-4, "llama-untied": 1e-4, "qwen3": 1e-4, "qwen3-yarn": 1e-4, "qwen35": 5e-4, "qwen35moe": 5e-4}
LOGIT |= {"qwen3moe": 1e-4, "qwen2": 1e-4, "mistral": 1e-4}
LOGIT |= {"laguna": 5e-4, "laguna-m1": 1e-4, "glm": 5e-4}  # of glm 3e-4 is a GGUF file's other epsilon of latent norms
LOGIT |= {"qwen3next": 5e-4, "gemma3": 1e-4, "glm4moe": 1e-4, "gptoss": 2e-4}  # experts of gptoss return tens
LOGIT |= {"phi3": 1e-4, "phi4mini": 2e-4}
LOGIT |= {"smollm3": 1e-4, "granite": 1e-4, "olmo2": 1e-4, "olmo3": 1e-4}
LOGIT |= {"deepseek2": 1e-4, "deepseek3": 1e-4, "granitemoe": 1e-4}
DELTA = ("qwen35", "qwen35moe", "qwen3next")
PIECES_LOGIT = LOGIT | dict.fromkeys(DELTA, 2e-3)  # MLX on the CPU multiplies long steps by another program
KL = 1e-9  # nats per position
STATE = {"keys": 5e-5, "values": 5e-5, "latent": 5e-5, "conv": 2e-5, "delta": 2e-5}  # of the largest element
DRIFT = {"keys": 3e-4, "values": 3e-4, "latent": 1e-4, "conv": 2e-5, "delta": 2e-5}  # the same: one step against many

PIECES = {
    "odd": [1, 3, 63, 64, 65, 2, 100, 4, 5],
    "shorter than the convolution": [2, 1, 2, 1, 3, 1],
    "halves": [256],
    "one token at a time, before and after many": [1] * 24 + [464] + [1] * 24,
}


@pytest.fixture(scope="module", params=tiny.MODELS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def whole(ops, name):
    """The model, its logits (512, vocab) and its state after reading the golden tokens in one step."""
    model = tiny.load(name, ops)
    return model, *tiny.chain_arrays(model, tiny.golden(name)["ids"])


def assert_golden(logits, name, label):
    errors = tiny.golden_errors(logits, name)
    print(f"{label} {name}: {errors}")
    assert errors.logit < LOGIT[name]
    assert errors.top1 == 1
    assert errors.kl < KL


def assert_close(arrays, expected, tolerance):
    for key, array in expected.items():
        error = np.abs(arrays[key] - array).max() / np.abs(array).max()
        assert error < tolerance[key.split(".")[0]], f"{key}: relative error {error:.1e}"


@pytest.mark.few(9)
def test_logits(ops, name, whole):
    _, logits, _ = whole
    assert_golden(logits, name, ops.name)


def test_state_after_prefill(name, whole):
    model, _, arrays = whole
    expected = tiny.golden_state(name, model.config)
    assert len(expected) == len(arrays)
    rows = ("keys", "values", "latent")
    stored = {key: array[::16] if key.startswith(rows) else array for key, array in arrays.items()}
    assert_close(stored, expected, STATE)


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES.keys())
@pytest.mark.few(9)
def test_pieces(name, whole, pieces):
    model, logits, arrays = whole
    state = model.new_state(tiny.CAPACITY)
    in_pieces = tiny.run(model, state, tiny.golden(name)["ids"], pieces)
    assert np.abs(in_pieces - logits).max() < PIECES_LOGIT[name]
    assert_close(tiny.arrays_of(model, state), arrays, DRIFT)
    assert_golden(in_pieces, name, model.ops.name)


@pytest.mark.parametrize("rows", [slice(-1, None), slice(3, 60, 7), slice(0, 0)])
def test_chosen_rows(name, whole, rows):
    """`rows` of a step picks rows of its logits and changes nothing else."""
    model, logits, _ = whole
    step = tiny.Step.chain(tiny.golden(name)["ids"][:64], 0)
    chosen = model.ops.read(model.forward(model.new_state(tiny.CAPACITY), step, rows))
    assert chosen.shape == logits[:64][rows].shape
    np.testing.assert_allclose(chosen, logits[:64][rows], atol=LOGIT[name])


@pytest.mark.parametrize("matrices", ["F32", "F16"])
@pytest.mark.few(6)
def test_gguf(ops, name, matrices, tmp_path):
    """The same weights as a GGUF file, after a multi-token-prediction block where the architecture has one."""
    path = write_gguf(tiny.FOLDER / name, tmp_path / "m.gguf", matrices, mtp=name.startswith("qwen35"))
    assert_golden(tiny.logits_of(load_model(path, ops), tiny.golden(name)["ids"]), name, f"{ops.name} GGUF {matrices}")


@pytest.mark.parametrize("matrices", ["Q8_0", "Q4_1"])
@pytest.mark.few(6)
def test_quantized_gguf(ops, name, matrices, tmp_path):
    """Quantized matrices give the logits of a file with gguf-py's reading of them."""
    ids = tiny.golden(name)["ids"][:128]
    paths = [
        write_gguf(tiny.FOLDER / name, tmp_path / f"{expand}.gguf", matrices, expand=expand) for expand in (False, True)
    ]
    packed, expanded = (tiny.logits_of(load_model(path, ops), ids) for path in paths)
    errors = tiny.errors(packed, expanded)
    assert errors.logit < LOGIT[name]
    assert errors.kl < KL
    assert tiny.golden_errors(packed, name).logit > 10 * LOGIT[name]  # it was quantized
