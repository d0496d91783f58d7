"""Makes tokenizer_golden.json.gz: a part of the Qwen2 vocabulary, a small SentencePiece model, texts and their ids.

    python tests/data/make_tokenizer_golden.py FOLDER

FOLDER holds ggml-vocab-qwen2.gguf and ggml-vocab-qwen35.gguf with their .inp (texts) and .out (ids), from
https://github.com/ggml-org/llama.cpp/tree/master/models (MIT). Of the vocabulary stay the tokens that occur in the
texts, so that every merge that could apply to them is there. All ids are llama.cpp's on the small vocabulary; for
"qwen2" and "qwen35" the published ones must agree. The SentencePiece model is trained here, on source text of Python's
standard library; its ids are llama.cpp's, and SentencePiece must agree.
Needs gguf, llama-cpp-python and sentencepiece.
"""

import argparse
import gzip
import inspect
import json
import sys
import tempfile
import typing
import unicodedata
from collections.abc import Callable
from pathlib import Path

import gguf
import llama_cpp
import sentencepiece

# Merges of our own: Qwen has no numbers of two digits, which would hide how the others split them.
DIGITS = {"11": "1 1", "111": "11 1", "1111": "11 11"}

# What the published texts lack: newline runs after punctuation, long numbers, code, mixed scripts, control tokens.
TEXTS = [
    "def f(x):\n    if x > 10:\n        return [1234567, 0.5]\n\n\n    return None\n",
    "a):\n\nb;\n\n\n  c}\n \n\td \n",
    "In 1984, 12345 people paid $1,999.99 (50%) for #7 <tags> ~ x^2 + y|z...\n",
    "I'm, you're, WE'LL, they'VE, it'd 'tis can't",
    "नमस्ते दुनिया, tiếng Việt, ภาษาไทย, العَرَبِيَّة, 한국어, 日本語ｶﾅ",
    "<|im_start|>user\nHi <|im_end|>there<|endoftext|>",
    "tabs\tand\u00a0other\u2003spaces\u3000 ½ ² Ⅷ ٣",
    "1 11 111 1111 11111 111111 1111111",
    "👩\u200d👩\u200d👧 🏳️\u200d🌈 \u200b\ufeff e\u0301 \u0301",
]
PRES = ("chatglm-bpe", "default", "glm4", "gpt-2", "laguna", "llama-bpe", "qwen2", "qwen35", "smollm")


def read_vocabulary(file: Path) -> dict:
    fields = gguf.GGUFReader(file).fields
    keys = [f"tokenizer.ggml.{key}" for key in ("model", "tokens", "token_type", "merges")]
    return {key: fields[key].contents() for key in keys}


def read_vectors(file: Path) -> list[tuple[str, list[int]]]:
    with open(f"{file}.inp", encoding="utf-8", newline="") as texts:
        split = texts.read().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{file}.out").read_text().splitlines()
    return [(text, [int(id) for id in line.split()]) for text, line in zip(split, lines, strict=False)]


def reduce(vocabulary: dict, texts: list[str]) -> tuple[dict, list[int]]:
    """The tokens that occur in the texts, all single bytes and all special ones; and their ids in the original."""
    stand_in = {byte: char for char, byte in byte_alphabet().items()}
    spelled = "\n".join("".join(stand_in[byte] for byte in text.encode()) for text in texts)
    tokens, types = vocabulary["tokenizer.ggml.tokens"], vocabulary["tokenizer.ggml.token_type"]
    padding = 151646  # the first of the fillers, which the file calls special

    def keep(id: int, token: str) -> bool:
        return id < padding and (types[id] != 1 or len(token) == 1 or token in spelled)

    kept = [id for id, token in enumerate(tokens) if keep(id, token)]
    merges = [merge for merge in vocabulary["tokenizer.ggml.merges"] if merge.replace(" ", "") in spelled]
    small = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*(tokens[id] for id in kept), *DIGITS],
        "tokenizer.ggml.token_type": [*(types[id] for id in kept), *(1 for _ in DIGITS)],
        "tokenizer.ggml.merges": [*merges, *DIGITS.values()],
        "tokenizer.ggml.bos_token_id": kept.index(151643),
        "tokenizer.ggml.eos_token_id": kept.index(151645),
        "tokenizer.ggml.add_bos_token": False,
    }
    return small, [*kept, *(len(tokens) + n for n in range(len(DIGITS)))]


def byte_alphabet() -> dict[str, int]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def train_sentencepiece(folder: Path) -> tuple[dict, sentencepiece.SentencePieceProcessor]:
    text = folder / "text"
    text.write_text("\n".join(inspect.getsource(module) for module in (argparse, inspect, typing)), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "model"),
        vocab_size=800,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=["<tool>"],
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(str(folder / "model.model"))
    ids = range(model.vocab_size())
    kinds = [(model.is_unknown, 2), (model.is_control, 3), (lambda id: model.id_to_piece(id) == "<tool>", 4)]
    kinds += [(model.is_byte, 6), (lambda id: True, 1)]
    config = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(id) for id in ids],
        "tokenizer.ggml.scores": [model.get_score(id) for id in ids],
        "tokenizer.ggml.token_type": [next(type for test, type in kinds if test(id)) for id in ids],
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
    }
    return config, model


def llama_encoder(config: dict, folder: Path) -> Callable[[str], list[int]]:
    """llama.cpp's encoding, without bos and with control tokens parsed, of a vocabulary-only file."""
    file = folder / "vocabulary.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    for key in ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"):
        writer.add_uint32(f"llama.{key}", 8)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in config.items():
        if key.endswith("token_type"):
            writer.add_array(key, [int(item) for item in value])
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    model = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
    return lambda text: model.tokenize(text.encode(), add_bos=False, special=True)


def main(source: str) -> None:
    vectors = {pre: read_vectors(Path(source) / f"ggml-vocab-{pre}.gguf") for pre in ("qwen2", "qwen35")}
    texts = list(dict.fromkeys([text for pairs in vectors.values() for text, _ in pairs] + TEXTS))
    nfc = [unicodedata.normalize("NFC", text) for text in texts]  # what a tokenizer.json of Qwen makes of them
    config, kept = reduce(read_vocabulary(Path(source) / "ggml-vocab-qwen35.gguf"), texts + nfc)
    published = {pre: dict(pairs) for pre, pairs in vectors.items()}

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ids = {}
        for pre in PRES:
            encode = llama_encoder(config | {"tokenizer.ggml.pre": pre}, folder)
            ids[pre] = [[kept[id] for id in encode(text)] for text in texts]
            for text, ours in zip(texts, ids[pre], strict=True):
                if text in published.get(pre, {}):
                    assert ours == published[pre][text], (pre, text)
        spm, model = train_sentencepiece(folder)
        spm_texts = [text for text in texts if "<|" not in text] + ["<tool> x<tool>y", "   three", "é<0x41>\n"]
        encode = llama_encoder(spm, folder)
        spm_ids = [encode(text) for text in spm_texts]
        for text, expected in zip(spm_texts, spm_ids, strict=True):
            # They part at tokens inside a text: llama.cpp and transformers put a space in front of what follows.
            assert "<tool>" in text or model.encode(text) == expected, text

    golden = {
        "bpe": {"config": config, "original_ids": kept, "texts": texts, "ids": ids},
        "spm": {"config": spm, "texts": spm_texts, "ids": spm_ids},
    }
    packed = gzip.compress(json.dumps(golden, ensure_ascii=False, separators=(",", ":")).encode(), mtime=0)
    Path(__file__).with_name("tokenizer_golden.json.gz").write_bytes(packed)
    print(f"{len(kept)} and {len(spm['tokenizer.ggml.tokens'])} tokens, {len(texts)} texts, {len(packed)} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
