"""A draft that does not fit is refused before any weight of the target is read, whoever loads the pair."""

import json

import pytest
import tiny
import tiny_chat
import tiny_eagle

import generate
from common import models
from common.demo import block_beside, demo_path
from common.errors import BimetalError
from generate.__main__ import main

OTHER = "is a draft for another model: its vocabulary is 96, the model's 258"
KINDS = {  # a draft for another target, and the words of its refusal
    **dict.fromkeys(("dflash", "dflash2", "dspark", "eagle3"), OTHER),
    "mtp-qwen35": "models have no multi-token-prediction block here; supported:",
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_chat.write(tmp_path_factory.mktemp("target") / "target")


@pytest.fixture(autouse=True)
def _unread(monkeypatch):
    monkeypatch.setattr(models, "load_weights", lambda *args, **kwargs: pytest.fail("weights of the target were read"))


@pytest.mark.parametrize("kind", KINDS)
def test_before_the_target_s_weights(kind, target, tmp_path, capsys):
    draft = tiny_eagle.write(tmp_path / "draft", 32, 96, [0, 1, 1]) if kind == "eagle3" else tiny.FOLDER / kind
    with pytest.raises(BimetalError, match=KINDS[kind]):
        generate.load(target, draft=draft, backend="numpy")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "hello"}))
    for job in (["--spec-prompts", str(prompts)], ["--streams", "1"]):
        assert main(["bench", "-m", str(target), "--backend", "numpy", *job, "--draft", str(draft)]) == 1
        assert KINDS[kind] in capsys.readouterr().err


def test_a_block_that_the_files_lack(target):
    with pytest.raises(BimetalError, match="models have no multi-token-prediction block here"):
        generate.load(target, draft="mtp", backend="numpy")


@pytest.mark.parametrize(
    "file", [*(tiny.FOLDER / kind for kind in ("dflash", "dflash2", "dspark")), demo_path("draft")]
)
def test_a_draft_in_place_of_a_model(file, tmp_path, capsys):
    """Those with the model_type of their model were refused for missing tensors, or described as a broken model."""
    for command in (["inspect", str(file)], ["fit", str(file)], ["quantize", str(file), str(tmp_path / "out")]):
        assert main(command) == 1
        assert capsys.readouterr().err == f"error: {file} is a draft; name its model, and this as the draft\n"


@pytest.mark.parametrize(
    "file", [*(tiny.FOLDER / f"mtp-{name}" for name in ("glm", "qwen35")), block_beside(demo_path())]
)
def test_a_block_in_place_of_a_model(file, tmp_path, capsys):
    """A file of a multi-token-prediction block alone was described as a model that lacks all its tensors."""
    for command in (["inspect", str(file)], ["fit", str(file)], ["quantize", str(file), str(tmp_path / "out")]):
        assert main(command) == 1
        error = f"error: {file} is a draft, a multi-token-prediction block; name its model, and this as the draft\n"
        assert capsys.readouterr().err == error
