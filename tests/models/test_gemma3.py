"""What Gemma 3's files do not state, or state in several ways, and folders with a vision tower."""

import numpy as np
import pytest
import tiny
from folders import rewritten
from test_golden import LOGIT

from common.checkpoint import open_checkpoint
from common.models import gemma3, load_model
from common.reference import NumpyOps
from generate.__main__ import main
from generate.synthetic import synthetic_checkpoint

ROWS = 64


def test_the_27b():
    """Scores are divided by the root of hidden / heads, which its GGUF files do not state; ten layers are full."""
    c = gemma3.read_config(synthetic_checkpoint("gemma-3-27b:q4_k_m"))
    assert (c.query_scalar, c.head_dim, c.tied) == (168, 128, True)
    assert [i for i, slides in enumerate(c.is_sliding) if not slides] == list(range(5, 62, 6))
    assert c.rope.frequencies[0] == pytest.approx(1 / 8)
    assert c.sliding_rope.frequencies[1] == pytest.approx(1e4 ** (-1 / 64))
    assert c.embedding_scale == 73.5  # in bfloat16; sqrt(5376) is 73.32


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_a_folder_with_a_vision_tower(prefix, tmp_path):
    """The folder that quantize writes has mlx-lm's names, and a GGUF file has no vision tower."""
    outer = "model." if prefix.startswith("model.") else ""
    vision = {f"{outer}vision_tower.patch.weight": np.ones((2, 2), np.float32)}

    def renamed(tensors):
        return {name.replace("model.", prefix, 1): array for name, array in tensors.items()} | vision

    config = tiny.checkpoint("gemma3").config
    folder = rewritten(tiny.FOLDER / "gemma3", tmp_path / "in", renamed, model_type="gemma3", text_config=config)
    assert main(["quantize", str(folder), str(tmp_path / "out"), "--bits", "8", "--group-size", "32"]) == 0
    assert main(["quantize", str(folder), str(tmp_path / "out.gguf"), "--type", "F32"]) == 0
    names = open_checkpoint(tmp_path / "out").tensors.keys()
    assert "vision_tower.patch.weight" in names
    assert all(name.startswith(("vision_tower.", "language_model.model.")) for name in names)
    file = open_checkpoint(tmp_path / "out.gguf")
    assert not any("vision" in name for name in file.tensors)
    ids = tiny.golden("gemma3")["ids"][:ROWS]
    errors = tiny.golden_errors(tiny.logits_of(load_model(file, NumpyOps()), ids), "gemma3")
    assert errors.logit < LOGIT["gemma3"]


def test_a_root_that_gguf_files_cannot_state(tmp_path, capsys):
    folder = rewritten(tiny.FOLDER / "gemma3", tmp_path / "in", query_pre_attn_scalar=24)
    assert gemma3.read_config(open_checkpoint(folder)).query_scalar == 24
    assert main(["quantize", str(folder), str(tmp_path / "out.gguf")]) == 1
    assert "a GGUF file cannot state query_scalar 24.0 of this model" in capsys.readouterr().err
