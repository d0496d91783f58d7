"""Gemma's tokenizer: SentencePiece BPE without a space in front, runs of spaces and newlines as tokens, ends of turns.

The folder is made by the `tokenizers` package with the settings of the published tokenizer.json; the GGUF metadata are
what llama.cpp's converter makes of the same vocabulary.
"""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from common.chat import chat_prompt
from common.tokenizer import load_tokenizer

CONTROL = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
RUNS = [*("\n" * n for n in range(1, 5)), *("▁" * n for n in range(2, 5))]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CORPUS = ["the cat and the dog sat on the mat", "def add(a, b): return a + b", "12 345, naïve: “yes”"] * 3
TEXTS = [
    *("the cat", " the  cat", "a   b", "x\n\n\ny", "    return a\n\n", "cat", "", " ", "  ", "\n"),
    *("naïve", "日本 é \U0001f600", "<h1>the</h1>", "the\n    cat  ", "12 345\r\n"),
]
TEMPLATE = (
    "{{ bos_token }}{% set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ first if loop.first }}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def backend():
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[*CONTROL, *BYTES], show_progress=False)
    trained.train_from_iterator([text.replace(" ", "▁") for text in CORPUS], trainer)
    model = json.loads(trained.to_str())["model"]
    vocab, merges = model["vocab"], [tuple(pair) for pair in model["merges"]]
    for run in RUNS:
        vocab.setdefault(run, len(vocab))
    runs = [(run[:at], run[at:]) for run in RUNS for at in range(1, len(run))]
    merges = runs + [pair for pair in merges if pair not in runs]
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.add_special_tokens([AddedToken(name, normalized=False) for name in CONTROL])
    made.add_tokens([AddedToken(run, normalized=False) for run in RUNS])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", vocab["<bos>"])])
    return made, vocab, merges


BACKEND, VOCAB, MERGES = backend()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text(BACKEND.to_str())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"add_bos_token": True, "bos_token": "<bos>", "eos_token": "<eos>", "chat_template": TEMPLATE})
    )
    return load_tokenizer(tmp_path, {"eos_token_id": [1]})


@pytest.fixture
def file():
    scores = {left + right: -float(rank) for rank, (left, right) in reversed(list(enumerate(MERGES)))}
    tokens = sorted(VOCAB, key=VOCAB.get)

    def kind(token):
        if token in CONTROL:
            return 2 if token == "<unk>" else 3
        return 6 if token in BYTES else 4 if token in RUNS else 1

    keys = {
        "model": "llama",
        "tokens": [token.replace("▁", " ") if token in RUNS else token for token in tokens],
        "scores": [scores.get(token, -1e6) for token in tokens],
        "token_type": [kind(token) for token in tokens],
        **{"bos_token_id": 2, "eos_token_id": 1, "add_bos_token": True, "add_space_prefix": False},
    }
    config = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return load_tokenizer("model.gguf", config | {"tokenizer.chat_template": TEMPLATE})


@pytest.mark.parametrize("text", TEXTS)
def test_texts(text, folder, file):
    expected = BACKEND.encode(text).ids
    for tokenizer in (folder, file):
        ids = tokenizer.encode(text)
        assert ids == expected
        assert tokenizer.decode(ids[1:]) == text


def test_a_turn_ends_a_reply(folder, file):
    for tokenizer in (folder, file):
        assert tokenizer.end_ids == {VOCAB["<eos>"], VOCAB["<end_of_turn>"]}


def test_a_chat(folder, file):
    """The system prompt goes to the first turn, bos occurs once, and control tokens of messages stay text."""
    messages = [
        {"role": "system", "content": "Be terse."},
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": "sat"},
        {"role": "user", "content": "on <end_of_turn>"},
    ]
    for tokenizer in (folder, file):
        prompt = chat_prompt(tokenizer, messages)
        assert prompt.text.startswith("<bos><start_of_turn>user\nBe terse.\n\nthe cat<end_of_turn>\n")
        assert prompt.text.endswith("<start_of_turn>model\n")
        assert prompt.tokens.count(VOCAB["<bos>"]) == 1
        assert prompt.tokens.count(VOCAB["<end_of_turn>"]) == 3
        assert tokenizer.decode(prompt.tokens) == prompt.text


def test_an_unknown_character_of_a_message(tmp_path):
    """Without byte tokens it has the token <unk>, a control token that text cannot spell: encoding did not end."""
    made = Tokenizer(models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>"))
    made.add_special_tokens(["<unk>"])
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    made.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path, {}).encode_plain("a日a") == [1, 0, 1]
