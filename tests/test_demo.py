"""The model that comes with the package: its files, its first tokens, and the cost of its small mix.

The golden replies are llama.cpp's from the same file in float32 (tests/data/make_demo_golden.py).
"""

import hashlib
import json
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
import tiny

import generate
from common.checkpoint import open_checkpoint
from common.demo import FOLDER, block_beside, demo_path
from common.errors import BimetalError
from common.hub import resolve_model
from common.models import load_model
from common.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[1]
REPLIES = json.loads((ROOT / "tests/data/demo_golden.json").read_text())
SUMS = dict(reversed(line.split()) for line in (FOLDER / "SHA256SUMS").read_text().splitlines())
SMALL = "demo:Q4_K_S"


@pytest.mark.parametrize("name", SUMS)
def test_checksum(name):
    assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == SUMS[name]


def test_size():
    assert {p.name for p in FOLDER.glob("*.gguf")} == SUMS.keys()
    assert sum((FOLDER / name).stat().st_size for name in SUMS) <= 49_000_000


def test_names():
    assert resolve_model("demo") == demo_path() == FOLDER / "demo-qwen35-Q8_0.gguf"
    assert resolve_model(SMALL) == resolve_model(SMALL.lower()) != demo_path()
    assert demo_path("draft").name == "demo-qwen35-dflash-Q8_0.gguf"
    assert all(block_beside(demo_path(name)).name == "demo-qwen35-mtp-Q8_0.gguf" for name in ("demo", SMALL))
    assert block_beside(FOLDER / "demo-wedlm-Q8_0.gguf") is None
    assert resolve_model("demo-wedlm").name == "demo-wedlm-Q8_0.gguf"
    with pytest.raises(BimetalError, match=r"no demo-qwen35-Q2_K\.gguf; of the demo model it has .*Q8_0"):
        resolve_model("demo:Q2_K")
    with pytest.raises(BimetalError, match="has no revision"):
        resolve_model("demo", revision="main")


def test_a_wheel_carries_them():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert (FOLDER / "__init__.py").exists()
    assert any(fnmatch("common.demo", pattern) for pattern in settings["packages"]["find"]["include"])
    carried = settings["package-data"]["common.demo"]
    for name in (*SUMS, "SHA256SUMS", "README.md"):
        assert any(fnmatch(name, pattern) for pattern in carried), name


def test_cards():
    card = (FOLDER / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert all(name in card for name in SUMS)


@pytest.mark.slow
def test_its_block_drafts():
    """More than half of the steps accept the first draft token; the text is that of plain decoding."""
    llm = generate.load("demo", draft="mtp", backend="numpy")
    prompt = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self"
    greedy = {"max_tokens": 40, "temperature": 0.0}
    drafted = llm.generate(prompt, spec="chain", tree_budget=3, **greedy)
    assert drafted.tokens == llm.generate(prompt, spec="off", **greedy).tokens
    assert drafted.stats.accepted.by_position[0] > 0.5
    llm.close()


def test_token_ids():
    checkpoint = open_checkpoint(demo_path())
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.config)
    for reply in REPLIES:
        assert tokenizer.encode(reply["prompt"]) == reply["ids"], reply["prompt"]
        assert tokenizer.decode(reply["ids"]) == reply["prompt"]


def logits_along(model, reply):
    """Logits (tokens, vocab) before each golden token of a reply, given the tokens before it."""
    ids = np.array(reply["ids"] + reply["reply"])
    return tiny.logits_of(model, ids)[len(reply["ids"]) - 1 : -1]


@pytest.fixture(scope="module")
def model(ops):
    return load_model(open_checkpoint(demo_path()), ops)


@pytest.mark.parametrize("index", range(len(REPLIES)))
@pytest.mark.few(4)
def test_first_tokens(model, index):
    reply = REPLIES[index]
    assert len(reply["reply"]) >= 16
    assert logits_along(model, reply).argmax(-1).tolist() == reply["reply"]


@pytest.mark.few(1)
def test_the_small_mix_mostly_agrees(ops):
    small = load_model(open_checkpoint(resolve_model(SMALL)), ops)
    same = [logits_along(small, reply).argmax(-1) == reply["reply"] for reply in REPLIES]
    assert np.concatenate(same).mean() >= 0.8
