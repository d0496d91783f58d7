"""The sampling that a model's files recommend: read, stated, and overridden by what is asked for."""

import json

import pytest
from tiny_chat import write

import generate
from common.checkpoint import Checkpoint
from common.demo import demo_path
from common.errors import BimetalError
from common.recommended import recommended_sampling
from generate.__main__ import main

CARD = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 1}


@pytest.fixture
def folder(tmp_path):
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(CARD))
    return tmp_path


def of_card(tmp_path, card):
    (tmp_path / "generation_config.json").write_text(json.dumps(card))
    return recommended_sampling(Checkpoint(tmp_path, "safetensors", {}, {}))


def test_cards(tmp_path):
    assert of_card(tmp_path, CARD).options == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert of_card(tmp_path, {"do_sample": True}).options == {"temperature": 1.0}
    assert of_card(tmp_path, {"temperature": 0.6, "repetition_penalty": 1.05}).options == {"repetition_penalty": 1.05}
    assert of_card(tmp_path, {"do_sample": True, "temperature": 0.2, "top_k": -1}).options == {"temperature": 0.2}
    assert of_card(tmp_path, {}).options == {}
    with pytest.raises(BimetalError, match=r"generation_config\.json recommends .* top_p is 2"):
        of_card(tmp_path, {"do_sample": True, "top_p": 2})


def test_metadata_of_a_gguf(tmp_path):
    config = {"general.sampling.temp": 0.75, "general.sampling.top_k": 40, "general.sampling.penalty_repeat": 1.0}
    found = recommended_sampling(Checkpoint(tmp_path / "a.gguf", "gguf", config, {}))
    assert (found.options, found.source) == ({"temperature": 0.75, "top_k": 40}, "a.gguf")
    assert recommended_sampling(Checkpoint(tmp_path / "a.gguf", "gguf", {}, {})).options == {}
    assert recommended_sampling(Checkpoint(demo_path(), "gguf", {}, {})).options["temperature"] > 0


def test_calls_take_what_they_are_not_given(folder, monkeypatch):
    with generate.load(str(folder), backend="numpy") as llm:
        seen = []
        submit = llm._engine.submit
        monkeypatch.setattr(llm._engine, "submit", lambda call: (seen.append(call.options), submit(call))[1])
        llm.generate("hi", max_tokens=2)
        llm.chat([{"role": "user", "content": "hi"}], max_tokens=2, temperature=0.0, top_k=None)
        assert [(o.temperature, o.top_k, o.top_p) for o in seen] == [(0.6, 20, 0.95), (0.0, 20, 0.95)]


def test_the_command_states_it(folder, capsys):
    flags = ["-m", str(folder), "--backend", "numpy", "-p", "hi", "-n", "4"]
    assert main(flags) == 0
    said = "sampling: temperature 0.6, top_p 0.95, top_k 20, as generation_config.json recommends\n"
    assert capsys.readouterr().err == said
    assert main([*flags, "--temperature", "0", "--top-k", "0", "--top-p", "1"]) == 0
    assert capsys.readouterr().err == ""
