"""LoRA adapters: logits of PEFT (data/make_adapters.py), from each kind of adapter on each kind of model file."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import oracles
import pytest
import ranks
import tiny
from folders import write_folder
from gguf_files import write_gguf
from safetensors.numpy import load_file, save_file

import generate
from common.adapted import is_adaptable, merged
from common.adapters import Adapter, Change, open_adapter
from common.checkpoint import Checkpoint, open_checkpoint
from common.demo import demo_path
from common.errors import BimetalError
from common.fit import predict_weights
from common.models import architecture, load_model
from common.quants import dequantize
from common.reference import NumpyOps
from common.weights import Matrix, dense
from generate.__main__ import main
from generate.prefixes import identity

FOLDER = Path(__file__).parents[1] / "data" / "adapters"
NAMES = sorted(path.name for path in FOLDER.iterdir())
KL = 1e-8
# As for models without an adapter; Gated DeltaNet's norms of small heads amplify rounding. Logits are up to 10.
CUDA_KL = 0.05  # factors are Q8_0, and these random changes are as large as the weights; without them it is 2.1 to 3.8
LOGIT = {"llama": 1e-4, "glm": 3e-4, "qwen35": 2e-3, "deepseek2": 1e-4, "olmo2": 1e-4}


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / name / "golden.npz") as file:
        return dict(file)


def adapted(checkpoint: Checkpoint, *paths: Path, scale: float = 1.0) -> Checkpoint:
    return replace(checkpoint, adapters=[open_adapter(path, scale) for path in paths])


def logits_of(checkpoint: Checkpoint, name: str, ops: NumpyOps) -> np.ndarray:
    return tiny.logits_of(load_model(checkpoint, ops), golden(name)["ids"], [20, 1])


def compare(checkpoint: Checkpoint, name: str, ops: NumpyOps | None = None) -> None:
    errors = tiny.errors(logits_of(checkpoint, name, ops or NumpyOps()), golden(name)["logits"])
    assert errors.logit < LOGIT[name]
    assert errors.top1 == 1
    assert errors.kl < KL


def as_mlx_lm(name: str, folder: Path) -> Path:
    """The adapter as mlx-lm's trainer would save it, with a scale of its own."""
    factors = load_file(FOLDER / name / "adapter_model.safetensors")
    config = json.loads((FOLDER / name / "adapter_config.json").read_text())
    tensors = {}
    for key, values in factors.items():
        module, half, _ = key.removeprefix("base_model.model.").rsplit(".", 2)
        scale = scale_of(config, module, factors[key.replace("lora_B", "lora_A")]) / 2 if half == "lora_B" else 1
        more = (
            ((0, 0), (0, config["r"] - values.shape[1]))
            if half == "lora_B"
            else ((0, config["r"] - len(values)), (0, 0))
        )
        tensors[f"{module}.{half.lower()}"] = np.pad(values, more).T * np.float32(scale)
    folder.mkdir()
    save_file({key: np.ascontiguousarray(values) for key, values in tensors.items()}, folder / "adapters.safetensors")
    keys = sorted({key.partition("layers.")[2].partition(".")[2].rpartition(".")[0] for key in tensors})
    parameters = {"rank": config["r"], "scale": 2.0, "dropout": 0.0, "keys": keys}
    (folder / "adapter_config.json").write_text(
        json.dumps({"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": parameters})
    )
    return folder


def scale_of(config: dict, module: str, down: np.ndarray) -> float:
    kind, rank = module.rpartition(".")[2], len(down)
    alpha = config["alpha_pattern"].get(kind, config["lora_alpha"])
    return float(alpha / (rank**0.5 if config["use_rslora"] else rank))


def as_gguf(name: str, path: Path) -> Path:
    """The adapter of the Llama as convert_lora_to_gguf.py writes it: rows of q and k in adjacent rope pairs."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 0.0)  # a scale of 1: the factors of ranks differ
    config = json.loads((FOLDER / name / "adapter_config.json").read_text())
    factors = load_file(FOLDER / name / "adapter_model.safetensors")
    kinds = {"q_proj": "attn_q", "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate"}
    for key, values in factors.items():
        module, half, _ = key.removeprefix("base_model.model.").rsplit(".", 2)
        kind = module.rpartition(".")[2]
        if half == "lora_B":
            values = values * np.float32(scale_of(config, module, factors[key.replace("lora_B", "lora_A")]))
            if kind == "q_proj":
                values = values.reshape(-1, 2, 8, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        layer = re.search(r"layers\.(\d+)", key)
        assert layer
        writer.add_tensor(f"blk.{layer[1]}.{kinds.get(kind, 'ffn_down')}.weight.{half.lower()}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", NAMES)
def test_peft(name):
    compare(adapted(tiny.checkpoint(name), FOLDER / name), name)


@pytest.mark.parametrize("name", NAMES)
def test_changes_the_logits(name):
    """The tolerance tells a model with its adapter from one without."""
    plain = tiny.errors(logits_of(tiny.checkpoint(name), name, NumpyOps()), golden(name)["logits"])
    assert plain.logit > 100 * LOGIT[name]


@pytest.mark.parametrize("name", NAMES)
def test_mlx(name):
    mlx = pytest.importorskip("mlx.core")
    from mlx_backend.ops import MlxOps

    compare(adapted(tiny.checkpoint(name), FOLDER / name), name, MlxOps(mlx.float32))


@pytest.mark.parametrize("name", NAMES)
def test_of_mlx_lm(name, tmp_path):
    compare(adapted(tiny.checkpoint(name), as_mlx_lm(name, tmp_path / "adapter")), name)


@pytest.mark.model
def test_mlx_lm_reads_the_adapter(tmp_path):
    """The folder that test_of_mlx_lm reads is what mlx-lm's own loader takes."""
    rope = tiny.checkpoint("llama").config["rope_parameters"]  # mlx-lm reads the older keys
    network = oracles.mlx_lm_model(tiny.FOLDER / "llama", rope_theta=rope["rope_theta"], rope_scaling=rope)
    from mlx_lm.tuner.utils import load_adapters

    network = load_adapters(network, str(as_mlx_lm("llama", tmp_path / "adapter")))
    found = oracles.mlx_lm_logits(network, golden("llama")["ids"])
    assert tiny.errors(found, golden("llama")["logits"]).logit < LOGIT["llama"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_cuda(name):
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from cuda_backend.ops import CudaOps

    ops, ids = CudaOps(), golden(name)["ids"]
    checkpoint = adapted(tiny.checkpoint(name), FOLDER / name)
    model = load_model(checkpoint, ops)
    found = tiny.logits_of(model, ids, [20, 1])
    errors = tiny.errors(found, golden(name)["logits"])
    assert errors.kl < CUDA_KL
    alone = tiny.logits_of(model, ids, [1] * len(ids))
    assert np.array_equal(found, alone)  # rows do not depend on the rows beside them


@pytest.mark.gpu
def test_cuda_long_steps():
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from cuda_backend.ops import CudaOps

    ids = np.tile(golden("llama")["ids"], 3)
    checkpoint = adapted(tiny.checkpoint("llama"), FOLDER / "llama")
    expected = tiny.logits_of(load_model(checkpoint, NumpyOps()), ids)
    errors = tiny.errors(tiny.logits_of(load_model(checkpoint, CudaOps()), ids), expected)
    assert errors.kl < CUDA_KL


@pytest.mark.parametrize("name", NAMES)
def test_peft_on_a_gguf_model(name, tmp_path):
    model = open_checkpoint(write_gguf(tiny.FOLDER / name, tmp_path / "model.gguf"))
    compare(adapted(model, FOLDER / name), name)


@pytest.mark.parametrize("base", ["safetensors", "gguf"])
def test_gguf(base, tmp_path):
    adapter = as_gguf("llama", tmp_path / "adapter.gguf")
    model = tiny.checkpoint("llama")
    if base == "gguf":
        model = open_checkpoint(write_gguf(tiny.FOLDER / "llama", tmp_path / "model.gguf"))
    compare(adapted(model, adapter), "llama")


@pytest.mark.parametrize("name", ["llama", "qwen35", "deepseek2", "olmo2"])
def test_ranks(name):
    checkpoint = adapted(tiny.checkpoint(name), FOLDER / name)
    found = ranks.together(2, lambda ops: logits_of(checkpoint, name, ops), False)
    errors = tiny.errors(found[0], golden(name)["logits"])
    assert errors.logit < 4 * LOGIT[name]
    assert errors.top1 == 1
    assert all(np.array_equal(each, found[0]) for each in found)


@pytest.mark.parametrize("name", tiny.MODELS)
def test_every_family(name):
    """With changes of all matrices that can change: the logits of these matrices plus their changes."""
    checkpoint, random = tiny.checkpoint(name), np.random.default_rng(0)
    definition = architecture(checkpoint)[1]
    changes, tensors = {}, dict(checkpoint.tensors)
    for layer, table in enumerate(definition.layout(definition.read_config(checkpoint), checkpoint).layers):
        matrices = [
            entry for key, entry in table.items() if isinstance(entry, Matrix) and is_adaptable(table, key, entry)
        ]
        for part in (part for entry in matrices for part in entry.parts if "hf" in part.aliases):
            down, up = (
                random.normal(size=size).astype(np.float32) / 20 for size in ((3, part.whole[1]), (part.whole[0], 3))
            )
            changes[layer, part.aliases["hf"][0]] = Change(down, up)
            tensors[part.names[0]] = dense(part.names[0], dequantize(tensors[part.names[0]]) + up @ down)
    adapter = Adapter(Path("adapter"), "hf", changes, 1.0)
    found, expected, plain = (
        tiny.logits_of(load_model(each, NumpyOps()), tiny.golden(name)["ids"][:32])
        for each in (replace(checkpoint, adapters=[adapter]), replace(checkpoint, tensors=tensors), checkpoint)
    )
    assert np.abs(found - expected).max() < 2e-3
    assert np.abs(found - plain).max() > 0.2


def test_several_and_their_scales():
    """Two halves of an adapter are the adapter."""
    half = open_adapter(FOLDER / "llama", 0.5)
    compare(replace(tiny.checkpoint("llama"), adapters=[half, half]), "llama")


def test_bytes():
    plain = load_model(tiny.checkpoint("llama"), NumpyOps())
    changed = load_model(adapted(tiny.checkpoint("llama"), FOLDER / "llama"), NumpyOps())
    assert changed.step_bytes > plain.step_bytes


def test_python(tmp_path):
    """The demo with an adapter of large random numbers gives another text, with a scale of 0 its own."""
    folder = random_adapter(demo_path(), tmp_path / "adapter")

    def text(*adapters):
        with generate.load("demo", adapter=adapters, backend="numpy", ctx=256) as llm:
            return llm.generate("def add(a, b):", max_tokens=8, temperature=0).text

    assert text(f"{folder}=0") == text() != text(str(folder))
    assert text(f"{folder}=0.5", f"{folder}=0.5") == text(str(folder))
    for adapter, words in ((f"{folder}=inf", "with a finite number X"), (str(tmp_path), "is not an adapter")):
        with pytest.raises(BimetalError, match=words):
            text(adapter)


def random_adapter(model: Path, folder: Path) -> Path:
    """An adapter for one matrix of the first layer of `model`, in mlx-lm's form."""
    checkpoint = open_checkpoint(model)
    layout = architecture(checkpoint)[1].layout(architecture(checkpoint)[1].read_config(checkpoint), checkpoint)
    (down,) = layout.layers[0]["down"].parts
    rows, columns = down.shape
    random = np.random.default_rng(0)
    folder.mkdir()
    factors = {"lora_a": random.normal(size=(columns, 4)), "lora_b": random.normal(size=(4, rows))}
    tensors = {f"model.layers.0.mlp.down_proj.{half}": values.astype(np.float32) for half, values in factors.items()}
    save_file(tensors, folder / "adapters.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"lora_parameters": {"rank": 4, "scale": 1.0}}))
    return folder


def test_prefix_cache_tells_adapters_apart():
    """States of a model with another adapter, or none, are not reused."""
    half, whole = (open_adapter(FOLDER / "llama", scale) for scale in (0.5, 1.0))
    found = {tuple(identity(replace(tiny.checkpoint("llama"), adapters=each))) for each in ([], [half], [whole])}
    assert len(found) == 3


def test_predicted_bytes():
    checkpoint = adapted(tiny.checkpoint("llama"), FOLDER / "llama")
    layout, ops = load_model(checkpoint, NumpyOps()).layout, NumpyOps()
    more = predict_weights(checkpoint, layout, ops) - predict_weights(tiny.checkpoint("llama"), layout, ops)
    model, plain = load_model(checkpoint, ops), load_model(tiny.checkpoint("llama"), ops)
    assert more == model.step_bytes - plain.step_bytes


@pytest.mark.parametrize("name", NAMES)
def test_merged_folder(name, tmp_path):
    """Weights in F32, since merged ones of BF16 are rounded."""
    source = tiny.checkpoint(name)
    tensors = {key: dense(key, dequantize(tensor)) for key, tensor in source.tensors.items()}
    checkpoint = adapted(replace(source, tensors=tensors), FOLDER / name)
    found = merged(checkpoint, load_model(source, NumpyOps()).layout)
    assert found.adapters == checkpoint.adapters
    compare(replace(found, adapters=()), name)


@pytest.mark.parametrize(("name", "out"), [(name, out) for name in NAMES for out in ("folder", "model.gguf")])
def test_quantize_merges(name, out, tmp_path):
    """A folder in F32 with an adapter becomes a model whose logits are those of both."""
    source = tiny.checkpoint(name)
    tensors = {key: dequantize(tensor) for key, tensor in source.tensors.items()}
    model = write_folder(tmp_path / "model", source.config, tensors)
    words = ["quantize", str(model), str(tmp_path / out), "--adapter", str(FOLDER / name)]
    assert main([*words, *(["--type", "F32"] if out.endswith("gguf") else ["--layers", "*=keep"])]) == 0
    compare(open_checkpoint(tmp_path / out), name)


def test_a_quantized_model_is_merged(tmp_path):
    """Of a GGUF file in Q8_0 the changed matrix is stored in F32."""
    writer = gguf.GGUFWriter(tmp_path / "adapter.gguf", "qwen35")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 4.0)
    rows, columns = open_checkpoint(demo_path()).tensors["blk.0.ffn_down.weight"].shape
    random = np.random.default_rng(0)
    for half, shape in (("a", (4, columns)), ("b", (rows, 4))):
        writer.add_tensor(f"blk.0.ffn_down.weight.lora_{half}", random.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    words = ["quantize", str(demo_path()), str(tmp_path / "merged.gguf"), "--adapter", str(tmp_path / "adapter.gguf")]
    assert main([*words, "--layers", "*=keep"]) == 0
    types = {key: tensor.type for key, tensor in open_checkpoint(tmp_path / "merged.gguf").tensors.items()}
    assert types["blk.0.ffn_down.weight"] == "F32"
    assert types["blk.1.ffn_down.weight"] == "Q8_0"
    checkpoint = adapted(open_checkpoint(demo_path()), tmp_path / "adapter.gguf")
    ids = np.arange(1, 33)
    found, expected = (
        tiny.logits_of(load_model(each, NumpyOps()), ids)
        for each in (open_checkpoint(tmp_path / "merged.gguf"), checkpoint)
    )
    assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()


def test_only_one_kind_is_merged(tmp_path):
    adapter = as_gguf("llama", tmp_path / "adapter.gguf")
    checkpoint = adapted(tiny.checkpoint("llama"), adapter)
    with pytest.raises(BimetalError, match="only adapters and models of one kind can be merged"):
        merged(checkpoint, load_model(tiny.checkpoint("llama"), NumpyOps()).layout)


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(tmp_path):
    return shutil.copytree(FOLDER / "llama", tmp_path / "adapter")


def rewrite(folder: Path, **keys) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return folder


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; supported: LORA"),
        ({"use_dora": True}, "use_dora is True; supported: False"),
        ({"bias": "all"}, "bias is 'all'; supported: none"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'; supported: True or False or gaussian"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']; supported: none"),
        ({"rank_pattern": {".*v_proj": 3}}, "rank_pattern has '.*v_proj': 3; supported: a name and a number"),
        ({"alpha_pattern": {"v_proj": "x"}}, "alpha_pattern has 'v_proj': 'x'; supported: a name and a number"),
        ({"r": 5}, "has rank 4; adapter_config.json says 5"),
        ({"r": None}, "lacks the required key r"),
        ({"lora_alpha": -1}, "lora_alpha is -1"),
        ({"kasa_config": {"x": 1}}, "kasa_config is {'x': 1}; supported: none"),
    ],
)
def test_refused_settings(keys, words, adapter):
    with pytest.raises(BimetalError, match=re.escape(words)):
        open_adapter(rewrite(adapter, **keys))


def changed(folder: Path, change) -> Path:
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(Q + "B.weight"), "lora_A.weight is no half of a pair .lora_A.weight, .lora_B.weight"),
        (lambda t: t.update({"x": t[Q + "A.weight"]}), "x is no half of a pair"),
        (lambda t: t.update({Q + "A.weight": t[Q + "A.weight"][0]}), "expected a matrix of floats"),
        (lambda t: t.update({Q + "A.weight": t[Q + "A.weight"].astype(np.int32)}), "expected a matrix of floats"),
        (lambda t: t[Q + "A.weight"].fill(np.nan), "lora_A.weight is not finite"),
    ],
)
def test_refused_tensors(change, words, adapter):
    with pytest.raises(BimetalError, match=re.escape(words)):
        open_adapter(changed(adapter, change))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "model.layers.0.self_attn.k_proj",
            "changes 'self_attn.k_proj.weight' by (64, 4) times (4, 32); the model's is",
        ),
        ("model.layers.9.self_attn.q_proj", "changes 'self_attn.q_proj.weight' of layer 9, which this model lacks"),
        (
            "vision_tower.layers.0.self_attn.q_proj",
            "changes 'vision_tower.layers.0.self_attn.q_proj.weight', which this",
        ),
        ("lm_head", "changes 'lm_head.weight', which this model lacks or cannot change; not changed are embeddings"),
    ],
)
def test_changes_that_the_model_cannot_take(name, words, adapter):
    def move(tensors):
        for half in "AB":
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = tensors.pop(f"{Q}{half}.weight")

    checkpoint = adapted(tiny.checkpoint("llama"), changed(adapter, move))
    with pytest.raises(BimetalError, match=re.escape(words)):
        load_model(checkpoint, NumpyOps())


def test_two_names_of_one_weight(adapter):
    def copy(tensors):
        for half in "AB":
            tensors[f"base_model.model.layers.0.self_attn.q_proj.lora_{half}.weight"] = tensors[f"{Q}{half}.weight"]

    with pytest.raises(BimetalError, match="changes the same weight as another one"):
        open_adapter(changed(adapter, copy))


def test_no_adapter(tmp_path):
    with pytest.raises(BimetalError, match="is not an adapter; supported: a folder"):
        open_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(BimetalError, match=r"has adapter_config.json and neither adapter_model.safetensors"):
        open_adapter(tmp_path)
    model = write_gguf(tiny.FOLDER / "llama", tmp_path / "model.gguf")
    with pytest.raises(BimetalError, match=r"general\.type is None; an adapter has 'adapter'"):
        open_adapter(model)
