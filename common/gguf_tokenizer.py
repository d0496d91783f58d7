"""The tokenizer that a GGUF file's metadata describe: vocabulary, merges, token types, the name of a pre-tokenizer."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from common.errors import BimetalError
from common.fim import GGUF_KEYS

# Pre-tokenizer patterns, as published in the models' tokenizer.json files. Qwen's files also normalize to NFC;
# llama.cpp does not, and a tokenizer rebuilt from a GGUF file follows llama.cpp.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_CASED = (  # words: capitals, then small letters
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_TEKKEN = "|".join(_CASED) + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
_O200K = "|".join(f"{word}{_CONTRACTIONS}?" for word in _CASED) + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# DeepSeek lists the letters with a case of an older Unicode; newer ones are excluded here.
_NEWER = "\u2d00-\u2d2d\ua790-\ua7ff\uab30-\uab68\U00010570-\U00016e7f\U0001d400-\U0001df1e"
_LETTERS = rf"\s?(?:(?![{_NEWER}])[\p{{Lu}}\p{{Ll}}\p{{Lt}}])+"
_MARKS = r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Kimi's words hold no Chinese characters, whose runs are words of their own.
_UPPER, _LOWER = (rf"[{letters}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for letters in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
)
_NEWLINE_RUN = r"(?:\r?\n)+(?!\r?\n)"


@dataclass(frozen=True)
class _Pre:
    """Meaning of a `tokenizer.ggml.pre` name: patterns applied in order, each of which isolates its matches."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word in the vocabulary is one token, even if merges do not produce it
    add_bos: bool = False  # when the file does not say


_PRE = {
    "qwen2": _Pre((_QWEN2,)),
    "deepseek-r1-qwen": _Pre((_QWEN2,)),
    "qwen35": _Pre((_QWEN35,)),
    "smollm": _Pre((r"\p{N}", _GPT2)),
    "refact": _Pre((r"\p{N}", _GPT2)),
    "gpt-2": _Pre((_GPT2,)),
    "default": _Pre((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "llama-bpe": _Pre((_LLAMA3,), ignore_merges=True, add_bos=True),
    "llama3": _Pre((_LLAMA3,), ignore_merges=True, add_bos=True),
    "llama-v3": _Pre((_LLAMA3,), ignore_merges=True, add_bos=True),
    "tekken": _Pre((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o": _Pre((_O200K,)),
    "glm4": _Pre((_LLAMA3,), ignore_merges=True),
    "chatglm-bpe": _Pre((_LLAMA3,)),
    "dbrx": _Pre((_LLAMA3,)),
    "smaug-bpe": _Pre((_LLAMA3,)),
    "deepseek-llm": _Pre((r"[\r\n]", _LETTERS, _MARKS, r"\s+$", _EAST_ASIAN, r"\p{N}+")),
    "kimi-k2": _Pre((_KIMI,)),
    "laguna": _Pre((_NEWLINE_RUN, _QWEN2)),
}


def pre_tokenizer_name(patterns: Sequence[str], ignore_merges: bool, preferred: str | None) -> str | None:
    """Return the `tokenizer.ggml.pre` name of a byte-level BPE that isolates these patterns in order, or None.

    preferred  the name to take where several have this meaning
    """
    same = [name for name, pre in _PRE.items() if (pre.patterns, pre.ignore_merges) == (tuple(patterns), ignore_merges)]
    return preferred if preferred in same else next(iter(same), None)


GPT2_PATTERN = _GPT2  # of a pre-tokenizer that leaves splitting to ByteLevel
_MAX_PIECE = 1024  # characters of a SentencePiece token; splitting one takes quadratic time
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type


class _Metadata:
    """The `tokenizer.ggml` keys of a GGUF file; a value of another type than requested raises BimetalError."""

    def __init__(self, config: Mapping[str, Any]):
        self.config = config

    def get(self, key: str, kind: type, default: Any = ...) -> Any:
        """Return the value at `key`; a missing key gives `default`, or an error without one."""
        value = self.config.get(f"tokenizer.ggml.{key}", default)
        if value is ...:
            raise BimetalError(f"tokenizer.ggml.{key} is missing")
        if value is not None and not isinstance(value, kind):
            raise BimetalError(f"tokenizer.ggml.{key} is {value!r:.60}, not a {kind.__name__}")
        return value

    def get_list(self, key: str) -> list:
        """Return the list at `key`, of Python's own values."""
        value = self.get(key, object)
        value = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(value, list):
            raise BimetalError(f"tokenizer.ggml.{key} is {value!r:.60}, not a list")
        return value

    def get_id(self, key: str, count: int) -> int | None:
        """Return the id of the token with a role, such as "bos", of `count` tokens; None if the file has none."""
        id = self.get(f"{key}_token_id", int, None)
        if id is not None and not 0 <= id < count:
            raise BimetalError(f"tokenizer.ggml.{key}_token_id is {id}, but there are {count} tokens")
        return id

    def added(self, name: str, id: int | None, default: bool) -> list[int]:
        """Return the token `id` if a prompt gets it: as the file says, else as `default` does."""
        adds = self.get(f"add_{name}_token", bool, None)
        if adds and id is None:
            raise BimetalError(f"tokenizer.ggml.add_{name}_token is true, but there is no {name}_token_id")
        return [id] if id is not None and (default if adds is None else adds) else []

    def templates(self) -> dict[str, str]:
        """Return the chat templates by name."""
        found = {}
        for key, source in self.config.items():
            if key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template."):
                if not isinstance(source, str):
                    raise BimetalError(f"{key} is {source!r:.60}, not text")
                found[key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default"] = source
        return found


def from_gguf(config: Mapping[str, Any]) -> tuple[Backend, dict[str, Any]]:
    """Return the package's tokenizer, and the other arguments of common.tokenizer.Tokenizer.

    Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; defaults where a key is absent: llama.cpp.
    """
    metadata = _Metadata(config)
    model = metadata.get("model", str)
    tokens, types = metadata.get_list("tokens"), metadata.get_list("token_type")
    if len(types) != len(tokens):
        raise BimetalError(f"there are {len(tokens)} tokens but {len(types)} entries in tokenizer.ggml.token_type")
    try:
        backend, add_bos = _backend(metadata, model, tokens, types)
        stripping = _strips_after(config.get("general.architecture"), model)
        backend.add_tokens(
            [
                AddedToken(token, special=type != _USER_DEFINED, normalized=False, rstrip=stripping(token))
                for token, type in zip(tokens, types, strict=True)
                if type in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token
            ]
        )
    except BimetalError:
        raise
    except Exception as error:  # the package raises plain Exception, TypeError and ValueError
        raise BimetalError(f"the vocabulary cannot be used: {error}") from None
    bos, eos, eot, eom = (metadata.get_id(key, len(tokens)) for key in ("bos", "eos", "eot", "eom"))
    fim = {role: [metadata.get_id(key, len(tokens)) for key in keys] for role, keys in GGUF_KEYS.items()}
    return backend, dict(
        prefix=metadata.added("bos", bos, add_bos),
        suffix=metadata.added("eos", eos, False),
        bos_id=bos,
        eos_id=eos,
        end_ids=[id for id in (eot, eom) if id is not None],
        chat_templates=metadata.templates(),
        fim={role: next((id for id in ids if id is not None), None) for role, ids in fim.items()},
    )


def _strips_after(architecture: Any, model: str) -> Callable[[str], bool]:
    """Return a test for tokens that take white space after them, which GGUF files do not state: Phi-3's own."""
    return lambda token: architecture == "phi3" and model == "llama" and token not in ("<unk>", "<s>", "<|endoftext|>")


def _backend(metadata: _Metadata, model: str, tokens: list[str], types: list[int]) -> tuple[Backend, bool]:
    """Return the package's tokenizer of a model "gpt2" or "llama", and whether prompts begin with bos by default."""
    if model == "gpt2":
        name = metadata.get("pre", str)
        if name not in _PRE:
            raise BimetalError(f"tokenizer.ggml.pre is {name!r}; supported: {', '.join(sorted(_PRE))}")
        return _byte_level_bpe(tokens, metadata.get_list("merges"), _PRE[name]), _PRE[name].add_bos
    if model == "llama":
        prefix_space = metadata.get("add_space_prefix", bool, True)
        return _sentencepiece_bpe(tokens, metadata.get_list("scores"), types, prefix_space), True
    raise BimetalError(f"tokenizer.ggml.model is {model!r}; supported: gpt2 (byte-level BPE), llama")


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    vocabulary = {token or f"[EMPTY_{id}]": id for id, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        id, token = next((id, token) for id, token in enumerate(tokens) if token and vocabulary[token] != id)
        raise BimetalError(f"the token {token!r} has two ids, {id} and {vocabulary[token]}")
    return vocabulary


def _byte_level_bpe(tokens: list[str], merges: list[str], pre: _Pre) -> Backend:
    # Python objects, because they load twice as fast as a tokenizer.json written for the package to parse.
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    backend = Backend(models.BPE(_vocabulary(tokens), pairs, ignore_merges=pre.ignore_merges))
    splits = [
        pre_tokenizers.Split(Regex(pattern), "merged_with_next" if pattern is _NEWLINE_RUN else "isolated")
        for pattern in pre.patterns
    ]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(tokens: list[str], scores: list[float], types: list[int], prefix_space: bool) -> Backend:
    """SentencePiece BPE: two neighbours merge if their text is a token, the best score first."""
    if len(scores) != len(tokens):
        raise BimetalError(f"there are {len(tokens)} tokens but {len(scores)} entries in tokenizer.ggml.scores")
    if not all(math.isfinite(score) for score in scores):
        raise BimetalError("tokenizer.ggml.scores has a score that is not a number")
    if (longest := max(map(len, tokens), default=0)) > _MAX_PIECE:
        raise BimetalError(f"a token has {longest} characters; at most {_MAX_PIECE} are supported")
    vocabulary = _vocabulary(tokens)
    ranked = []
    for token, score, type in zip(tokens, scores, types, strict=True):
        if type == _NORMAL:
            for at in range(1, len(token)):
                left, right = token[:at], token[at:]
                if left in vocabulary and right in vocabulary:
                    ranked.append((-score, vocabulary[left], vocabulary[right], left, right))
    ranked.sort()
    unknown = next((token for token, type in zip(tokens, types, strict=True) if type == _UNKNOWN), None)
    backend = Backend(
        models.BPE(vocabulary, [merge[3:] for merge in ranked], unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    replace = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix_space else replace
    strip = [decoders.Strip(" ", 1, 0)] if prefix_space else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend
