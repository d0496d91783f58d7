"""Folders of models of embeddings, as those of Qwen3-Embedding: names without `model.`, modules.json, 1_Pooling."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny
import tiny_chat

import generate
from common.embeddings import embed
from common.errors import BimetalError
from common.models import load_model
from common.ops import Ops
from common.pooling import Pooling
from common.scores import completed
from generate.__main__ import main

ENDS = {"end": ["Transformer", "Pooling", "Normalize"], "long": ["Transformer", "Pooling"]}


def without_class(folder: Path, source: Path, **keys: object) -> Path:
    """Write the model of `source` to `folder` as the network alone is saved; `keys` are added to config.json."""
    folder.mkdir(exist_ok=True)
    data = (source / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    kept, values = {}, b""
    for name, entry in header.items():
        if name not in ("lm_head.weight", "__metadata__"):
            start, end = entry["data_offsets"]
            where = [len(values), len(values) + end - start]
            kept[name.removeprefix("model.")] = entry | {"data_offsets": where}
            values += data[8 + size + start : 8 + size + end]
    text = json.dumps(kept).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + values)
    config = json.loads((source / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def state(folder: Path, pooling: str, kinds: list[str]) -> None:
    """State a pooling and modules as sentence-transformers does."""
    modules = [{"idx": i, "path": "", "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))


def chat_folder(folder: Path) -> Path:
    """A folder with a tokenizer that ends each text with the end token, as Qwen3-Embedding's does."""
    tiny_chat.end_texts(tiny_chat.write(folder, fim=tiny_chat.FIM))
    return without_class(folder, folder, tie_word_embeddings=True)


@pytest.mark.parametrize("source", ["qwen3", "llama"])
def test_names_without_model_load(ops: Ops, source: str, tmp_path: Path) -> None:
    folder = without_class(tmp_path, tiny.FOLDER / source, architectures=["Qwen3ForCausalLM"], tie_word_embeddings=True)
    ids = tiny.golden(source)["ids"].tolist()[:40]
    found, expected = (
        completed(embed(model, ids, 40, Pooling())) for model in (load_model(folder, ops), tiny.load(source, ops))
    )
    assert np.array_equal(found, expected)


def test_a_model_without_a_head_gives_embeddings_alone(tmp_path: Path) -> None:
    """As Qwen3-Embedding-8B, whose config.json does not tie the head."""
    folder = chat_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    with generate.load(folder, backend="numpy") as llm:
        assert llm.embed("abc").shape == (tiny_chat.HIDDEN,)
        for call in (llm.generate, llm.logits, llm.score):
            with pytest.raises(generate.UsageError, match=r"no head \(lm_head.weight\): it generates no text"):
                call("abc")
    (tmp_path / "text.txt").write_text("a text " * 9)
    assert main(["perplexity", str(folder), "--text", str(tmp_path / "text.txt"), "--ctx-window", "8"]) == 2


def test_the_folder_states_pooling_and_length(tmp_path: Path) -> None:
    folder, found = chat_folder(tmp_path), {}
    for name, kinds in ENDS.items():
        for pooling in ("lasttoken", "mean_tokens"):
            state(folder, pooling, kinds)
            with generate.load(folder, backend="numpy") as llm:
                ids = [*llm.tokenizer.encode("abc", add_special_tokens=False), llm.tokenizer.eos_id]
                found[name, pooling] = llm.embed("abc")
                assert np.array_equal(found[name, pooling], llm.embed(ids))
    for pooling in ("lasttoken", "mean_tokens"):
        length = np.linalg.norm(found["long", pooling])
        assert abs(length - 1) > 0.1
        assert np.allclose(found["long", pooling] / length, found["end", pooling], atol=1e-6)
    assert not np.allclose(found["end", "lasttoken"], found["end", "mean_tokens"], atol=0.01)
    state(folder, "lasttoken", ["Transformer", "Pooling", "Dense", "Normalize"])
    with generate.load(folder, backend="numpy") as llm, pytest.raises(BimetalError, match="has the module Dense"):
        llm.embed("abc")


@pytest.mark.parametrize("out", ["folder", "model.gguf"])
def test_a_quantized_model_keeps_what_the_folder_states(out: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    folder = chat_folder(tmp_path / "source")
    state(folder, "mean_tokens", ENDS["end"])
    to_gguf = ["--type", "q8_0"] if out.endswith("gguf") else ["--bits", "8", "--group-size", "32"]
    assert main(["quantize", str(folder), str(tmp_path / out), *to_gguf]) == 0
    with generate.load(folder, backend="numpy") as llm:
        expected, ids = llm.embed("abc"), llm.tokenizer.encode("abc")
    with generate.load(tmp_path / out, backend="numpy") as llm:
        assert llm.tokenizer.encode("abc") == ids
        assert llm.embed("abc") @ expected > 0.995


def test_a_gguf_file_cannot_state_an_embedding_of_another_length(tmp_path: Path, capsys) -> None:
    pytest.importorskip("gguf")
    folder = chat_folder(tmp_path / "source")
    state(folder, "mean_tokens", ENDS["long"])
    assert main(["quantize", str(folder), str(tmp_path / "model.gguf")]) == 1
    assert "a GGUF file cannot state embeddings without a normalization" in capsys.readouterr().err
