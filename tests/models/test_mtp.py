"""The multi-token-prediction block: against another implementation, from every kind of file, and its refusals."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny
from draft_files import LOGIT, assert_drafts_leave_no_trace, assert_refused, states
from folders import rewritten, write_folder
from gguf_files import write_gguf

from common.checkpoint import open_checkpoint
from common.fit import predict_run
from common.models import load_model
from common.models.drafts import load_pair
from common.models.mtp import MtpPair
from common.quants import dequantize
from common.reference import NumpyOps
from common.step import Step

ROOT = Path(__file__).parents[2]
NAMES = ["qwen35", "qwen35moe", "glm", "glm4moe"]


def folder_of(name: str) -> Path:
    return tiny.FOLDER / f"mtp-{name}"


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(folder_of(name) / "golden.npz") as file:
        return dict(file)


def text(name: str) -> np.ndarray:
    return tiny.golden(name)["ids"].astype(np.int32)


def pair_name(pair) -> str:
    if pair.architecture in ("glm4_moe_lite", "deepseek2"):
        return "glm"
    if pair.architecture in ("glm4_moe", "glm4moe"):
        return "glm4moe"
    return "qwen35moe" if pair.config.experts else "qwen35"


def proposals(pair, anchors, depth):
    """Logits (anchors, depth, vocab) after one to `depth` tokens of the text from each anchor."""
    ids, rows = text(pair_name(pair)), []
    for (state, _), anchor in zip(states(pair, ids, anchors), anchors, strict=True):
        drafts = (ids[anchor : anchor + n].tolist() for n in range(1, depth + 1))
        rows += [pair.ops.read(pair.propose(state, tokens))[0] for tokens in drafts]
    return np.stack(rows).reshape(len(anchors), depth, -1)


def assert_golden(pair):
    expected = golden(pair_name(pair))
    got = proposals(pair, expected["anchors"], expected["logits"].shape[1])
    assert np.abs(got - expected["logits"]).max() < LOGIT


def tensors_of(name: str) -> dict[str, np.ndarray]:
    return {n: dequantize(tensor) for n, tensor in open_checkpoint(folder_of(name)).tensors.items()}


def whole(name: str, path: Path, prefix: str = "") -> Path:
    """A folder of model and block; the block's tensors are called with another prefix."""
    return rewritten(tiny.FOLDER / name, path, lambda t: t | {prefix + n: a for n, a in tensors_of(name).items()})


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_another_implementation(name, ops):
    """From a file of the block alone: text of several steps, and drafts of which each reads the one before."""
    pair = load_pair(folder_of(name), tiny.load(name, ops))
    assert isinstance(pair, MtpPair)
    assert_golden(pair)


@pytest.mark.parametrize(
    ("name", "prefix"), [("qwen35", ""), ("qwen35", "language_model."), ("glm", ""), ("glm4moe", "")]
)
def test_in_the_model_s_own_folder(name, prefix, ops, tmp_path):
    folder = whole(name, tmp_path / "m", prefix)
    target = load_model(folder, ops)
    assert_golden(load_pair(folder, target))
    ids = text(name)[:32]
    assert np.array_equal(tiny.logits_of(target, ids), tiny.logits_of(tiny.load(name, ops), ids))


@pytest.mark.parametrize("name", NAMES)
def test_in_the_model_s_own_gguf(name, ops, tmp_path):
    path = write_gguf(tiny.FOLDER / name, tmp_path / "m.gguf", mtp=tensors_of(name))
    assert_golden(load_pair(path, load_model(path, ops)))


def test_the_demo_s_export(ops, tmp_path, monkeypatch):
    """Of the block alone, by the recipe in examples/train."""
    monkeypatch.syspath_prepend(ROOT / "examples" / "train")
    from export_mtp import export

    target, out = write_gguf(tiny.FOLDER / "qwen35", tmp_path / "m.gguf"), tmp_path / "block.gguf"
    export(folder_of("qwen35"), target, out, "F32")
    assert_golden(load_pair(out, load_model(target, ops)))
    assert open_checkpoint(out).config["qwen35.nextn_predict_layers"] == 1


def test_a_quantized_gguf(ops, tmp_path):
    """The logits of gguf-py's reading of the file; both halves of fc begin at a quantization block."""
    logits = []
    for expand in (False, True):
        path = tmp_path / f"{expand}.gguf"
        write_gguf(tiny.FOLDER / "qwen35", path, "Q8_0", tensors_of("qwen35"), expand)
        logits.append(proposals(load_pair(path, load_model(path, ops)), [7, 20], 2))
    assert np.abs(logits[0] - logits[1]).max() < LOGIT


def test_its_own_embedding_and_head(ops, tmp_path):
    """Those of the file are taken before the target's."""
    table = dequantize(tiny.checkpoint("glm").tensors["model.embed_tokens.weight"])
    head = dequantize(tiny.checkpoint("glm").tensors["lm_head.weight"])
    own = {"embed_tokens.weight": 2 * table, "shared_head.head.weight": 3 * head}
    tensors = tensors_of("glm") | {f"model.layers.3.{name}": array for name, array in own.items()}
    folder = write_folder(tmp_path / "m", json.loads((folder_of("glm") / "config.json").read_text()), tensors)
    pair = load_pair(folder, tiny.load("glm", ops))
    got, expected = (proposals(each, [7], 1) for each in (pair, load_pair(folder_of("glm"), tiny.load("glm", ops))))
    assert np.abs(got - 3 * expected).max() < 3 * LOGIT  # a norm makes the embedding's factor 1


def test_a_draft_changes_nothing_and_a_tree_commits_like_a_chain(ops):
    assert_drafts_leave_no_trace(load_pair(folder_of("qwen35"), tiny.load("qwen35", ops)), text("qwen35"))


def test_the_last_row_has_the_bits_of_the_target_alone():
    """Also in a prompt of more rows than a step of decoding has, of which the block reads every row."""
    target = tiny.load("qwen35", NumpyOps())
    pair, ids = load_pair(folder_of("qwen35"), target), text("qwen35")[:200]
    rows = [each.forward(each.new_state(300), Step.chain(ids, 0), slice(199, 200)) for each in (target, pair)]
    assert np.array_equal(*rows)


def test_its_memory_is_predicted():
    pair = load_pair(folder_of("qwen35"), tiny.load("qwen35", NumpyOps()))
    _, layout, spec = pair.blueprint
    assert len(layout.layers) == len(spec) == len(pair.new_state(8).layers) == 9
    assert min(predict_run(pair.ops, pair.blueprint, 100, 50)) > 0


REFUSED = [
    ("qwen35", "no block", "has no multi-token-prediction block"),
    ("llama", "no block", "llama models have no multi-token-prediction block here; supported: deepseek2"),
    ("glm", "another model", "for a glm4_moe_lite model is needed, or a draft of the kind DFlash, DFlash2, DSpark or"),
    ("glm", "two blocks", "has 2 multi-token-prediction blocks; supported: 1"),
    ("qwen35", "MLX's layout", "has a multi-token-prediction block in MLX's layout; supported: GGUF, and safetensors"),
    ("qwen35", "a missing norm", "lacks tensor mtp.pre_fc_norm_hidden.weight"),
    ("qwen35", "another width", r"mtp.fc.weight: shape \(32, 48\), the model's configuration says"),
]


@pytest.mark.parametrize(("name", "what", "words"), REFUSED)
def test_refusals(name, what, words, tmp_path):
    path = tmp_path / "m"
    if what == "no block":
        path = tiny.FOLDER / name
    elif what == "another model":
        path = folder_of("qwen35")
    elif what == "two blocks":
        block = tensors_of(name)
        fc = {n.replace("layers.3", "layers.4"): a for n, a in block.items() if n.endswith("eh_proj.weight")}
        rewritten(folder_of(name), path, lambda t: t | fc)
    elif what == "MLX's layout":
        rewritten(folder_of(name), path, lambda t: t | {"conv1d.weight": np.zeros((4, 4, 1), np.float32)})
    elif what == "another width":
        rewritten(folder_of(name), path, lambda t: t | {"mtp.fc.weight": t["mtp.fc.weight"][:, :48]})
    else:
        rewritten(folder_of(name), path, lambda t: {n: a for n, a in t.items() if "pre_fc_norm_hidden" not in n})
    assert_refused(path, name, words)
