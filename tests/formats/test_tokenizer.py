import gzip
import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import encoded_parts
from common.checkpoint import open_checkpoint
from common.demo import block_beside, demo_path
from common.errors import BimetalError, UsageError
from common.gguf_tokenizer import pre_tokenizer_name
from common.tokenizer import load_tokenizer

DATA = Path(__file__).parent.parent / "data" / "tokenizer_golden.json.gz"
GOLDEN = json.loads(gzip.decompress(DATA.read_bytes()))
BPE, SPM = GOLDEN["bpe"], GOLDEN["spm"]


def bpe(pre="gpt-2", **keys):
    config = BPE["config"] | {"tokenizer.ggml.pre": pre}
    return load_tokenizer("model.gguf", config | {f"tokenizer.ggml.{key}": value for key, value in keys.items()})


def spm(**keys):
    return load_tokenizer("model.gguf", SPM["config"] | {f"tokenizer.ggml.{key}": value for key, value in keys.items()})


TOKENIZERS = {pre: bpe(pre) for pre in BPE["ids"]} | {"spm": spm()}
END, IM_END = (TOKENIZERS["gpt-2"].token_to_id(name) for name in ("<|endoftext|>", "<|im_end|>"))
BOS = SPM["config"]["tokenizer.ggml.bos_token_id"]
EOS = SPM["config"]["tokenizer.ggml.eos_token_id"]
NEW = (("scores", -1000.0), ("token_type", 3))  # of a control token that is appended


@pytest.mark.parametrize("pre", BPE["ids"])
def test_byte_level_ids(pre):
    original = BPE["original_ids"]
    for text, expected in zip(BPE["texts"], BPE["ids"][pre], strict=True):
        ids = TOKENIZERS[pre].encode(text, add_special_tokens=False)
        assert [original[id] for id in ids] == expected, text
        assert TOKENIZERS[pre].decode(ids) == text


def test_sentencepiece_ids():
    for text, expected in zip(SPM["texts"], SPM["ids"], strict=True):
        assert TOKENIZERS["spm"].encode(text, add_special_tokens=False) == expected, text
        if "<tool>" not in text:
            assert TOKENIZERS["spm"].decode(expected) == text


@pytest.mark.model
@pytest.mark.skipif("BIMETAL_VOCAB" not in os.environ, reason="BIMETAL_VOCAB names a folder of vocabulary GGUFs")
@pytest.mark.parametrize("name", ["qwen2", "qwen35"])
def test_published_vectors(name):
    """llama.cpp's models/ggml-vocab-*.gguf with their .inp and .out files, on the whole vocabulary."""
    gguf = pytest.importorskip("gguf")
    file = Path(os.environ["BIMETAL_VOCAB"]) / f"ggml-vocab-{name}.gguf"
    config = {key: field.contents() for key, field in gguf.GGUFReader(file).fields.items()}
    tokenizer = load_tokenizer(file, config)
    with open(f"{file}.inp", encoding="utf-8", newline="") as texts:
        split = texts.read().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{file}.out").read_text().splitlines()
    assert len(lines) > 40
    for text, line in zip(split, lines, strict=False):  # the last separator is followed by nothing
        assert tokenizer.encode(text, add_special_tokens=False) == [int(id) for id in line.split()], text


@pytest.mark.model
@pytest.mark.parametrize(("pre", "module", "name"), [("qwen2", "qwen2", "Qwen2"), ("qwen35", "qwen3_5", "Qwen3_5")])
def test_ids_are_those_of_transformers(pre, module, name):
    transformers = pytest.importorskip("transformers")
    config = BPE["config"]
    vocabulary = {token: id for id, token in enumerate(config["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in config["tokenizer.ggml.merges"]]
    kind = getattr(getattr(transformers.models, module), f"{name}Tokenizer")
    reference = kind(vocab=vocabulary, merges=merges)
    # What the golden has from llama.cpp, and texts on which normalizers and exotic case folding matter.
    for text in [*BPE["texts"], "e\u0301a\u0300 \u1100\u1161", "\u212b it'\u017f \u212a", "a\r\n\r\nb \r"]:
        if "<|" not in text:
            normalized = unicodedata.normalize("NFC", text)  # which transformers does first
            assert TOKENIZERS[pre].encode(normalized) == reference.encode(text), text


@given(st.text())
@pytest.mark.parametrize("name", ["default", "glm4", "gpt-2", "laguna", "qwen2", "qwen35", "smollm"])
def test_decoding_undoes_encoding(name, text):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    decoder = tokenizer.decoder()
    pieces = [decoder.push(id) for id in ids]
    assert "".join(pieces) == text, "nothing is held back at the end of a whole text"
    assert decoder.flush() == ""


@given(st.text(alphabet=st.characters(exclude_characters="▁", exclude_categories=["Cs"])))
def test_decoding_undoes_sentencepiece(text):
    ids = TOKENIZERS["spm"].encode(text, add_special_tokens=False, parse_special=False)
    assert TOKENIZERS["spm"].decode(ids) == text


@given(st.data())
@pytest.mark.parametrize("name", ["gpt-2", "spm"])
@pytest.mark.parametrize("skip_special_tokens", [False, True])
def test_pieces_join_to_the_whole_for_any_ids(name, skip_special_tokens, data):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1)))
    decoder = tokenizer.decoder(skip_special_tokens)
    pieces = [decoder.push(id) for id in ids] + [decoder.flush()]
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens)
    raw = b"".join(tokenizer.token_bytes(id) for id in ids if not (skip_special_tokens and id in tokenizer._special))
    expected = raw.decode("utf-8", "replace")
    assert tokenizer.decode(ids, skip_special_tokens) == (expected.removeprefix(" ") if name == "spm" else expected)


@given(st.text())
@pytest.mark.parametrize("name", ["gpt-2", "spm"])
def test_decoding_is_that_of_the_tokenizers_package(name, text):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == tokenizer._backend.decode(ids, skip_special_tokens=False)


def test_a_character_is_never_shown_by_halves():
    tokenizer = TOKENIZERS["gpt-2"]
    ids = tokenizer.encode("é🜚")
    assert len(ids) == 4
    decoder = tokenizer.decoder()
    assert [piece for piece in map(decoder.push, ids) if piece] == ["é", "🜚"]
    assert decoder.push(ids[1]) + decoder.push(END) == "\ufffd<|endoftext|>"
    assert decoder.push(tokenizer.token_to_id("ð")) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""


@pytest.mark.parametrize("name", TOKENIZERS)
@given(st.text(max_size=40), st.integers(1, 30))
def test_a_bound_without_encoding(name, text, times):
    tokenizer = TOKENIZERS[name]
    for part in (text, " ", "<|im_end|>", "\x04", "e\u0301"):
        assert tokenizer.least_tokens(part * times) <= len(tokenizer.encode(part * times, add_special_tokens=False))


PIECES = ("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<tool>", "</s>", "<|im", "_end|>", "<", "|", ">", " ", "\n\n")


@pytest.mark.parametrize("name", TOKENIZERS)
@given(st.lists(st.one_of(st.sampled_from([*PIECES, "some words", "1234", "é🜚"]), st.text(max_size=9)), max_size=12))
@pytest.mark.few(4)
def test_parts_have_the_ids_of_the_whole_text(name, pieces):
    tokenizer, text = TOKENIZERS[name], "".join(pieces)
    assert (tokenizer._parts is None) == (name == "spm")  # where a text's first part is encoded otherwise
    tokenizer._backend.encode_special_tokens = False
    (whole,) = tokenizer._backend.encode_batch([text], add_special_tokens=False)
    control = [(*at, id) for id, at in zip(whole.ids, whole.offsets, strict=True) if id in tokenizer._control]
    for _ in range(2):  # encoded, and remembered
        assert tokenizer.encode_and_find(text) == (whole.ids, control)


def test_parts_are_encoded_once_and_forgotten(monkeypatch):
    monkeypatch.setattr(encoded_parts, "REMEMBERED", 3 * (4 + encoded_parts.OVERHEAD))
    monkeypatch.setattr(encoded_parts, "MOST_PARTS", 4)
    tokenizer, encoded = bpe(), []
    encode = tokenizer._parts.encode
    tokenizer._parts.encode = lambda texts: (encoded.extend(texts), encode(texts))[1]
    for text in ("aaaa", "bbbb", "cccc", "aaaa", "dddd", "bbbb", "aaaa"):
        tokenizer.encode_and_find(f"{text}<|im_end|>{text}")[0].clear()  # the result is the caller's own
        assert tokenizer.encode_and_find(text)[0] == tokenizer.encode(text, add_special_tokens=False)
    assert encoded == ["aaaa", "bbbb", "cccc", "dddd", "bbbb"]
    many = tokenizer.encode_and_find("aaaa<|im_end|>" * 5)
    assert (len(many[1]), encoded[5:]) == (5, [])


def test_white_space_beyond_what_the_package_can_split():
    """It was a Rust panic, which no `except Exception` catches."""
    text = "a" + " " * 20_000_000
    for pre in ("qwen2", "llama-bpe"):
        with pytest.raises(BimetalError, match="1048576 characters of white space in a row"):
            TOKENIZERS[pre].encode(text)
        with pytest.raises(BimetalError, match="1048576 characters of white space in a row"):
            TOKENIZERS[pre].encode_plain(text)
        assert TOKENIZERS[pre].least_tokens(text) > 100_000


def test_json_beside_a_tokenizer_that_cannot_be(tmp_path):
    """A number of thousands of digits was Python's own error, and a pipe in a file's place held up the loading."""
    from tiny_chat import write

    file = write(tmp_path) / "tokenizer_config.json"
    for text, says in (
        ("[" * 100_000, "is not JSON"),
        (f'{{"a": {"1" * 5000}}}', "is not JSON"),
        ("[]", "holds a list"),
    ):
        file.write_text(text)
        with pytest.raises(BimetalError, match=says):
            load_tokenizer(tmp_path, {})
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(BimetalError, match=r"config.json is not a regular file$"):
        open_checkpoint(tmp_path)


def test_a_regular_expression_of_a_file_that_gives_up(tmp_path):
    """As above, a panic."""
    from tiny_chat import write

    file = write(tmp_path) / "tokenizer.json"
    state = json.loads(file.read_text())
    slow = {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated", "invert": False}
    state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [slow, state["pre_tokenizer"]]}
    file.write_text(json.dumps(state))
    tokenizer = load_tokenizer(tmp_path, {})
    for encode in (tokenizer.encode, tokenizer.encode_plain):
        with pytest.raises(BimetalError, match="the model's tokenizer fails on this text"):
            encode("a" * 100 + "!")
    assert tokenizer.encode("ab")


def test_special_tokens():
    tokenizer, text = TOKENIZERS["qwen2"], "Hi<|im_end|>"
    assert tokenizer.encode(text)[-1] == IM_END
    plain = tokenizer.encode(text, parse_special=False)
    assert IM_END not in plain
    assert tokenizer.decode(plain) == tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text)[-1] == IM_END, "the setting of one call does not stay for the next"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == "Hi"
    assert TOKENIZERS["spm"].encode("<unk>", add_special_tokens=False) == [TOKENIZERS["spm"].token_to_id("<unk>")]
    types = [4 if id == IM_END else type for id, type in enumerate(BPE["config"]["tokenizer.ggml.token_type"])]
    visible = bpe(token_type=types)  # user-defined tokens are atomic but belong to the text
    assert visible.encode(text, parse_special=False)[-1] == IM_END
    assert visible.decode([IM_END], skip_special_tokens=True) == "<|im_end|>"


def test_bos_and_eos():
    assert not TOKENIZERS["qwen2"].add_bos
    word = TOKENIZERS["gpt-2"].encode("Hi")
    tokenizer = bpe(add_bos_token=True, add_eos_token=True)
    assert tokenizer.add_bos
    assert tokenizer.encode("Hi") == [END, *word, IM_END]
    assert tokenizer.encode("<|endoftext|>Hi") == [END, *word, IM_END], "a template that writes bos gets no second one"
    assert tokenizer.encode("Hi", add_special_tokens=False) == word
    assert bpe("llama-bpe", add_bos_token=None).encode("Hi")[0] == END, "the default of this pre-tokenizer"
    assert bpe("qwen2", add_bos_token=None).encode("Hi") == word
    assert TOKENIZERS["spm"].encode("x")[0] == BOS
    assert spm(add_bos_token=False, add_space_prefix=False).encode("x") == [spm().token_to_id("x")]


def test_end_ids():
    tokenizer = bpe(eot_token_id=0, eom_token_id=1)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (END, IM_END)
    assert tokenizer.end_ids == {0, 1, END, IM_END}
    assert TOKENIZERS["spm"].end_ids == {EOS}
    names = ("〈|EOS|〉", "</assistant>", "<|user|>", "plain")
    config = {"tokens": [*names, "</s>"], "token_type": [3, 4, 3, 1, 1], "merges": []}
    assert bpe(**config, bos_token_id=0, eos_token_id=0).end_ids == {0, 1, 2}, "ordinary tokens end nothing"


def test_words_of_the_vocabulary_that_no_merge_reaches():
    tokens = [*BPE["config"]["tokenizer.ggml.tokens"], "Ġzyzzyva"]
    types = [*BPE["config"]["tokenizer.ggml.token_type"], 1]
    for pre, whole in (("glm4", True), ("llama-bpe", True), ("chatglm-bpe", False), ("qwen2", False)):
        ids = bpe(pre, tokens=tokens, token_type=types).encode("a zyzzyva")
        assert (ids[-1] == len(tokens) - 1) is whole


def test_names_of_one_meaning():
    for text in BPE["texts"]:
        assert bpe("deepseek-r1-qwen").encode(text) == bpe("qwen2").encode(text)
        assert bpe("dbrx").encode(text) == bpe("chatglm-bpe").encode(text)
        assert bpe("refact").encode(text) == bpe("smollm").encode(text)
        assert bpe("smaug-bpe").encode(text) == bpe("chatglm-bpe").encode(text)


def test_own_tokens_of_phi3_take_the_white_space_after_them():
    """As in its tokenizer.json; a GGUF file does not state it. Ids of llama.cpp's ggml-vocab-phi-3.gguf are so too."""
    tokens = [*SPM["config"]["tokenizer.ggml.tokens"], "<|user|>", "<|end|>", "<|endoftext|>"]
    added = {f"tokenizer.ggml.{key}": [*SPM["config"][f"tokenizer.ggml.{key}"], *[value] * 3] for key, value in NEW}
    config = SPM["config"] | added | {"tokenizer.ggml.tokens": tokens}
    phi3 = load_tokenizer("model.gguf", config | {"general.architecture": "phi3"})
    text, word = "<|user|>\n a<|end|>\n<|endoftext|>\n", phi3.encode("a", add_special_tokens=False)
    user, end, last = range(len(tokens) - 3, len(tokens))
    newline = phi3.encode("\n", add_special_tokens=False)
    assert phi3.encode(text, add_special_tokens=False) == [user, *word, end, last, *newline]
    assert phi3.end_ids == {EOS, user, end, last}
    assert load_tokenizer("model.gguf", config).encode(text, False) != phi3.encode(text, False)


def test_tekken_splits():
    """Words by their letters' cases, single digits, slashes with the punctuation before them."""
    backend = bpe("tekken")._backend

    def pieces(text):
        return [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]

    assert pieces("getHTTPResponse ÉTÉs été 123") == ["get", "HTTPResponse", " ÉTÉs", " été", " ", "1", "2", "3"]
    assert pieces("a+=/\n\n  b don't") == ["a", "+=/\n\n", " ", " b", " don", "'t"]
    assert bpe("tekken", bos_token_id=5, add_bos_token=None).add_bos


O200K = (  # of the tokenizer.json of gpt-oss-20b
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def test_gpt_4o_splits():
    """Words with their contractions, three digits at a time, slashes with the punctuation before them."""
    backend = bpe("gpt-4o", bos_token_id=5, add_bos_token=None)._backend

    def pieces(text):
        return [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]

    assert pieces("getHTTPResponse ÉTÉs été 1234567") == [
        "get",
        "HTTPResponse",
        " ÉTÉs",
        " été",
        " ",
        "123",
        "456",
        "7",
    ]
    assert pieces("a+=/\n\n  b don't I'LL") == ["a", "+=/\n\n", " ", " b", " don't", " I'LL"]
    assert not bpe("gpt-4o", bos_token_id=5, add_bos_token=None).add_bos
    assert pre_tokenizer_name([O200K], False, None) == "gpt-4o"


def test_gpt_oss_ends_a_reply_at_a_call_or_a_return():
    """Not at the end of a message: a reply has several."""
    names = ("<|return|>", "<|call|>", "<|end|>", "<|message|>", "<|endoftext|>")
    config = {"tokens": [*names, "</s>"], "token_type": [3, 3, 3, 3, 3, 1], "merges": []}
    assert bpe("gpt-4o", **config, bos_token_id=None, eos_token_id=0).end_ids == {0, 1, 4}


def test_deepseek_splits():
    """Line ends one by one; letters with a case, marks, East Asian letters and digits, a space before the first two."""
    backend = bpe("deepseek-llm")._backend

    def pieces(text):
        return [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]

    assert pieces("Hi there, été!\r\n") == ["Hi", " there", ",", " é", "t", "é", "!", "\r", "\n"], (
        "ASCII letters are marks"
    )
    assert pieces("\n\n x=12") == ["\n", "\n", " x", "=", "12"]
    assert pieces("ab你好，世界かな  ") == ["ab", "你好", "，", "世界かな", "  "]
    assert pieces("Übü Ελλάδα Россия 한국") == ["Ü", "b", "ü", " Ελλάδα", " Россия", " ", "한국"]
    assert pieces("x\U0001d400y") == ["x", "\U0001d400", "y"], "a letter of mathematics has a case in newer Unicode"


def test_kimi_splits():
    """Words by their letters' cases, with a contraction; runs of Chinese characters; three digits at most."""
    backend = bpe("kimi-k2")._backend

    def pieces(text):
        return [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]

    assert pieces("getHTTPResponse DON'T don't 1234") == ["get", "HTTPResponse", " DON'T", " don't", " ", "123", "4"]
    assert pieces("abc你好def， 世界かな한국") == ["abc", "你好", "def", "，", " ", "世界", "かな한국"]
    assert pieces("a+=/\n\n  b\n \n") == ["a", "+=/\n\n", " ", " b", "\n \n"]


def test_laguna_splits_before_a_run_of_newlines():
    def pieces(name):
        return [TOKENIZERS[name].decode([id]) for id in TOKENIZERS[name].encode("):\n")]

    assert pieces("laguna") == ["):", "\n"]
    assert pieces("qwen2") == ["):\n"]


def test_chat_templates():
    assert TOKENIZERS["qwen2"].chat_template is None
    config = BPE["config"] | {"tokenizer.ggml.pre": "qwen2"}
    config |= {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    tokenizer = load_tokenizer("model.gguf", config | {"tokenizer.chat_templates": ["tool_use"]})
    assert tokenizer.chat_template == "plain"
    assert tokenizer.chat_templates == {"default": "plain", "tool_use": "tools"}
    with pytest.raises(BimetalError, match=r"tokenizer\.chat_template is 7, not text"):
        load_tokenizer("model.gguf", config | {"tokenizer.chat_template": 7})


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"pre": "falcon"}, "tokenizer.ggml.pre is 'falcon'; supported: chatglm-bpe, .*, default, "),
        ({"model": "t5"}, "tokenizer.ggml.model is 't5'; supported: gpt2"),
        ({"model": 7}, "tokenizer.ggml.model is 7, not a str"),
        ({"tokens": "abc"}, "tokenizer.ggml.tokens is 'abc', not a list"),
        ({"token_type": [1]}, "tokens but 1 entries in tokenizer.ggml.token_type"),
        ({"merges": ["Ġ"]}, "the vocabulary cannot be used"),
        ({"merges": ["Ġ nosuchtoken"]}, "the vocabulary cannot be used: .*nosuchtoken"),
        ({"merges": [7]}, "the vocabulary cannot be used"),
        ({"tokens": [7] * len(BPE["original_ids"])}, "has two ids"),
        ({"tokens": ["x"] * len(BPE["original_ids"])}, "the token 'x' has two ids, 0 and "),
        ({"eos_token_id": 10**6}, "tokenizer.ggml.eos_token_id is 1000000, but there are "),
        ({"bos_token_id": -1}, "tokenizer.ggml.bos_token_id is -1"),
        ({"add_bos_token": True, "bos_token_id": None}, "add_bos_token is true, but there is no bos_token_id"),
        ({"add_bos_token": "yes"}, "tokenizer.ggml.add_bos_token is 'yes', not a bool"),
    ],
)
def test_bad_byte_level_metadata(keys, error):
    with pytest.raises(BimetalError, match=f"^model.gguf: .*{error}"):
        bpe(**keys)


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"scores": [0.0]}, "tokens but 1 entries in tokenizer.ggml.scores"),
        ({"scores": [float("nan")] * 800}, "a score that is not a number"),
        ({"scores": ["x"] * 800}, "the vocabulary cannot be used"),
        ({"tokens": ["x" * 100_000, *map(str, range(799))]}, "a token has 100000 characters; at most 1024"),
        ({"token_type": [1] * 799}, "800 tokens but 799 entries"),
    ],
)
def test_bad_sentencepiece_metadata(keys, error):
    with pytest.raises(BimetalError, match=error):
        spm(**keys)


@pytest.mark.parametrize("key", ["tokens", "token_type", "merges", "pre"])
def test_missing_metadata(key):
    config = BPE["config"] | {"tokenizer.ggml.pre": "qwen2"}
    del config[f"tokenizer.ggml.{key}"]
    with pytest.raises(BimetalError, match=f"^model.gguf: tokenizer.ggml.{key} is missing"):
        load_tokenizer("model.gguf", config)


def test_bad_input():
    tokenizer = TOKENIZERS["gpt-2"]
    with pytest.raises(BimetalError, match=r"half a surrogate pair, '\\ud800', at position 1"):
        tokenizer.encode("a\ud800")
    for id in (-1, tokenizer.vocab_size, 10**12):
        with pytest.raises(BimetalError, match=f"token id {id} is not in the vocabulary of"):
            tokenizer.decode([id])


def test_tokens_that_only_fill_up():
    count = len(BPE["original_ids"])
    tokens = [*BPE["config"]["tokenizer.ggml.tokens"], "", "", "[PAD9]", "〈|SPARE|〉"]
    tokenizer = bpe(tokens=tokens, token_type=[*BPE["config"]["tokenizer.ggml.token_type"], 1, 5, 5, 1])
    assert tokenizer.vocab_size == count + 4
    assert tokenizer.decode([count + 3]) == "〈|SPARE|〉"
    assert count + 2 not in tokenizer.encode("[PAD9]")


@pytest.fixture
def folder(tmp_path):
    backend = bpe("qwen2")._backend
    backend.encode_special_tokens = False
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(file, value):
    file.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


def test_folder(folder):
    write(folder / "tokenizer_config.json", {"eos_token": {"content": "<|im_end|>"}, "bos_token": None})
    write(folder / "generation_config.json", {"eos_token_id": [IM_END, 5], "bos_token_id": END})
    tokenizer = load_tokenizer(folder, {"model_type": "qwen3", "eos_token_id": 6})
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (END, IM_END, False)
    assert tokenizer.end_ids == {END, IM_END, 5, 6}
    assert tokenizer.vocab_size == len(BPE["original_ids"])
    assert tokenizer.chat_template is None
    for text in BPE["texts"]:
        assert tokenizer.encode(text) == TOKENIZERS["qwen2"].encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert load_tokenizer(folder / "model.safetensors", {}).encode("Hi") == tokenizer.encode("Hi")


def test_settings_of_training_in_a_file_change_nothing(folder):
    """Padding would lengthen the parts of a prompt, which are encoded together; truncation would cut it."""
    text = "<|im_start|>Hi<|im_end|>" + "a longer text " * 20
    expected = load_tokenizer(folder, {}).encode_and_find(text)
    backend = bpe("qwen2")._backend
    backend.enable_padding(pad_id=IM_END, pad_token="<|im_end|>")
    backend.enable_truncation(8)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder, {})
    assert tokenizer.encode_and_find(text) == expected
    assert tokenizer.encode(text) == expected[0]


def test_folder_of_a_sentencepiece_model(tmp_path):
    spm()._backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path, {"bos_token_id": BOS})
    for text, expected in zip(SPM["texts"], SPM["ids"], strict=True):
        assert tokenizer.encode(text) == expected
        assert tokenizer.decode(expected) == TOKENIZERS["spm"].decode(expected)


def test_folder_bos(folder):
    from tokenizers.processors import TemplateProcessing

    word = TOKENIZERS["qwen2"].encode("Hi")
    backend = bpe("qwen2")._backend
    backend.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", END)])
    backend.save(str(folder / "tokenizer.json"))
    write(folder / "special_tokens_map.json", {"bos_token": "<|endoftext|>"})
    tokenizer = load_tokenizer(folder, {})
    assert tokenizer.add_bos
    assert tokenizer.encode("Hi") == tokenizer.encode("<|endoftext|>Hi") == [END, *word]
    write(folder / "tokenizer_config.json", {"add_bos_token": False})
    assert load_tokenizer(folder, {}).encode("Hi") == word


def test_folder_templates(folder):
    def templates():
        return load_tokenizer(folder, {}).chat_templates

    for nothing in (None, [], ""):
        write(folder / "tokenizer_config.json", {"chat_template": nothing})
        assert templates() == {}
    write(folder / "tokenizer_config.json", {"chat_template": "a"})
    assert templates() == {"default": "a"}
    named = [{"name": "default", "template": "b"}, {"name": "tool_use", "template": "t"}]
    write(folder / "tokenizer_config.json", {"chat_template": named})
    assert templates() == {"default": "b", "tool_use": "t"}
    write(folder / "chat_template.json", {"chat_template": "c"})
    assert templates() == {"default": "c", "tool_use": "t"}
    (folder / "additional_chat_templates").mkdir()
    write(folder / "additional_chat_templates" / "rag.jinja", "r")
    write(folder / "chat_template.jinja", "d")
    assert templates() == {"default": "d", "tool_use": "t", "rag": "r"}


@pytest.mark.parametrize(
    ("file", "content", "error"),
    [
        ("tokenizer.json", "{", "tokenizer.json cannot be read"),
        ("tokenizer.json", "[]", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json is not JSON"),
        ("generation_config.json", "[]", "generation_config.json holds a list, not an object"),
        ("tokenizer_config.json", {"chat_template": 7}, "a chat template that is not text"),
        ("tokenizer_config.json", {"chat_template": [{"name": "x"}]}, "a chat template that is not text"),
    ],
)
def test_broken_folder(folder, file, content, error):
    write(folder / file, content)
    with pytest.raises(BimetalError, match=error):
        load_tokenizer(folder, {})


def test_a_file_without_a_tokenizer():
    """A draft in a GGUF file has none."""
    path = block_beside(demo_path())
    with pytest.raises(BimetalError, match=r"mtp-Q8_0\.gguf has no tokenizer, .*; if it is a draft, name its model"):
        load_tokenizer(path, open_checkpoint(path).config)


def test_folder_without_a_supported_tokenizer(tmp_path):
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(BimetalError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path, {})
    word_piece = {
        "type": "WordPiece",
        "unk_token": "u",
        "continuing_subword_prefix": "#",
        "max_input_chars_per_word": 9,
    }
    write(
        tmp_path / "tokenizer.json", {"version": "1.0", "added_tokens": [], "model": word_piece | {"vocab": {"u": 0}}}
    )
    with pytest.raises(BimetalError, match="decodes with nothing; byte-level BPE and SentencePiece are supported"):
        load_tokenizer(tmp_path, {})
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    spm()._backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(BimetalError, match=r"chat_template.jinja is not UTF-8: .* at byte 0"):
        load_tokenizer(tmp_path, {})


def test_importing_is_light():
    code = "import sys, common.tokenizer; sys.exit(len({'jinja2', 'numpy', 'torch'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0


@pytest.mark.parametrize("ids", ["x", "12", b"ab", None, 1.5, [1.5], [[1]], [None]])
def test_what_is_no_token_id_is_not_decoded(ids):
    """The error was Python's, about an operator."""
    with pytest.raises(UsageError, match=r"the ids to decode are .*; they must be a token id or a list of them"):
        TOKENIZERS["gpt-2"].decode(ids)


def test_numbers_of_numpy_are_decoded():
    tokenizer = TOKENIZERS["gpt-2"]
    assert tokenizer.decode(np.int64(5)) == tokenizer.decode(5) == tokenizer.decode(np.array([5]))
