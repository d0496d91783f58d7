"""Text to token ids and back, from a GGUF file's metadata or a Hugging Face folder.

The work is done by the `tokenizers` package; this module rebuilds the tokenizer that a GGUF file describes (vocabulary,
merges, token types and the name of a pre-tokenizer), finds the special ids, and decodes bytes rather than strings, so
that a character split over tokens is never shown by halves.
"""

import codecs
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from common.errors import BimetalError

if TYPE_CHECKING:
    from common.chat import ChatPrompt

# Pre-tokenizer patterns, as published in the models' tokenizer.json files. Qwen's files also normalize to NFC, which
# llama.cpp does not; a tokenizer rebuilt from a GGUF follows llama.cpp, whose format that is.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_NEWLINE_RUN = r"(?:\r?\n)+(?!\r?\n)"


@dataclass(frozen=True)
class _Pre:
    """What a `tokenizer.ggml.pre` name stands for: patterns applied in order, each isolating its matches."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a whole word that is in the vocabulary is one token, reachable by merges or not
    add_bos: bool = False  # when the file does not say


_PRE = {
    "qwen2": _Pre((_QWEN2,)),
    "qwen35": _Pre((_QWEN35,)),
    "smollm": _Pre((r"\p{N}", _GPT2)),
    "gpt-2": _Pre((_GPT2,)),
    "default": _Pre((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "llama-bpe": _Pre((_LLAMA3,), ignore_merges=True, add_bos=True),
    "llama3": _Pre((_LLAMA3,), ignore_merges=True, add_bos=True),
    "llama-v3": _Pre((_LLAMA3,), ignore_merges=True, add_bos=True),
    "glm4": _Pre((_LLAMA3,), ignore_merges=True),
    "chatglm-bpe": _Pre((_LLAMA3,)),
    "laguna": _Pre((_NEWLINE_RUN, _QWEN2)),
}


def pre_tokenizer_name(patterns: Sequence[str], ignore_merges: bool) -> str | None:
    """The `tokenizer.ggml.pre` name of a byte-level BPE that isolates these patterns in order, or None."""
    same = (name for name, pre in _PRE.items() if (pre.patterns, pre.ignore_merges) == (tuple(patterns), ignore_merges))
    return next(same, None)


GPT2_PATTERN = _GPT2  # of a pre-tokenizer that leaves splitting to ByteLevel

# Tokens that end a reply in the families we run; files often declare only one of theirs.
_END_TOKENS = (
    *("<|im_end|>", "<|endoftext|>"),  # Qwen, SmolLM
    *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>"),  # Llama
    *("<|user|>", "<|observation|>"),  # GLM
    *("</assistant>", "〈|EOS|〉"),  # Laguna
)

_MAX_PIECE = 1024  # characters of a SentencePiece token; splitting one takes quadratic time
_MAX_SPACES = 1 << 20  # in a row; the package's regular expressions give up at ten times as many
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: 33-126, 161-172 and 174-255 are themselves, the rest U+0100 onwards."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_alphabet()


class Tokenizer:
    """One vocabulary: `encode`, `decode`, and what a generation loop needs to know of its special tokens.

    vocab_size      ids 0..vocab_size-1 have a text; a model may have more logits (padding), which have none
    bos_id, eos_id  int or None
    end_ids         ids that end a reply
    add_bos         encode(add_special_tokens=True) starts with bos_id
    chat_templates  Jinja sources by name: "default", sometimes "tool_use" and others
    """

    def __init__(
        self,
        backend: Backend,
        *,
        prefix: Iterable[int] = (),
        suffix: Iterable[int] = (),
        bos_id: int | None = None,
        eos_id: int | None = None,
        end_ids: Iterable[int] = (),
        chat_templates: Mapping[str, str] | None = None,
    ):
        added = backend.get_added_tokens_decoder()
        decoder = "" if backend.decoder is None else backend.decoder.__getstate__().decode()
        if "ByteLevel" not in decoder and "ByteFallback" not in decoder and "Metaspace" not in decoder:
            raise BimetalError(
                f"the tokenizer decodes with {decoder or 'nothing'}; byte-level BPE and SentencePiece are supported"
            )
        self._backend = backend
        self._lock = Lock()  # parse_special is a setting of the backend, not an argument
        self._added = {id: token.content.encode() for id, token in added.items()}
        self._special = frozenset(id for id, token in added.items() if token.special)
        self._byte_level = "ByteLevel" in decoder
        self._strips_space = not self._byte_level and _removes_first_space(json.loads(decoder))
        self._prefix, self._suffix = list(prefix), list(suffix)
        self.vocab_size: int = max([backend.get_vocab_size(with_added_tokens=False), *(id + 1 for id in added)])
        self.bos_id = bos_id
        self.eos_id = eos_id
        named = (self.token_to_id(name) for name in _END_TOKENS)
        self.end_ids = frozenset(end_ids) | {id for id in named if id in added}
        if eos_id is not None:
            self.end_ids |= {eos_id}
        self._control = self._special | (self.end_ids & added.keys())
        self.add_bos = bos_id is not None and self._prefix[:1] == [bos_id]
        self.chat_templates = dict(chat_templates or {})

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def vocab(self) -> dict[str, int]:
        """Ids by token, in the spelling of the tokenizer's files."""
        vocab: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return vocab

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of `text`.

        add_special_tokens  put bos (or what the model uses) in front, unless the text starts with it
        parse_special       control tokens spelled out in the text become their ids; off for text from strangers. Tokens
                            that a model calls plain text, such as <think>, are one id either way.
        """
        _check_text(text)
        with self._lock:
            self._backend.encode_special_tokens = not parse_special
            ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if not add_special_tokens:
            return ids
        head = [] if ids[: len(self._prefix)] == self._prefix else self._prefix
        return head + ids + self._suffix

    @property
    def control_tokens(self) -> list[str]:
        """The texts of the control tokens, by id: those that files mark as special, and those that end a reply."""
        return [self._added[id].decode() for id in sorted(self._control)]

    def find_control(self, text: str, parse_special: bool = True) -> list[tuple[int, int, int]]:
        """Start, end and id of each control token that `encode` finds in `text`."""
        _check_text(text)
        with self._lock:
            self._backend.encode_special_tokens = not parse_special
            found = self._backend.encode(text, add_special_tokens=False)
        return [(*span, id) for id, span in zip(found.ids, found.offsets, strict=True) if id in self._control]

    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text`, none of them a control token.

        Some files do not mark the token that ends a reply as special; where `text` spells that out, it is cut in two.
        """
        ids, left = list[int](), [text]
        while left:
            text = left.pop()
            cuts = [start + 1 for start, _, _ in self.find_control(text, parse_special=False)]
            if cuts:
                left += [text[a:b] for a, b in pairwise([0, *cuts, len(text)])][::-1]
            else:
                ids += self.encode(text, add_special_tokens=False, parse_special=False)
        return ids

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, **options: Any) -> "ChatPrompt":
        """The prompt of `messages`, as text and as token ids; options as in common.chat.chat_prompt."""
        from common.chat import chat_prompt  # Jinja is for chats alone

        return chat_prompt(self, messages, tools, **options)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None, tokenize: bool = True, **options: Any
    ) -> list[int] | str:
        """The token ids of `messages` that a chat begins with, or their text; options as in common.chat.chat_prompt."""
        prompt = self.chat_prompt(messages, tools, **options)
        return prompt.tokens if tokenize else prompt.text

    def check_fits(self, text: str, context: int) -> None:
        """Refuse a text that has more than `context` tokens where that is certain without encoding it: BimetalError."""
        if len(text) > context and (least := self.least_tokens(text)) > context:
            raise BimetalError(
                f"the prompt has at least {least} tokens and the context holds {context}; shorten it or raise ctx"
            )

    def least_tokens(self, text: str) -> int:
        """A number of tokens that `encode(text)` cannot go below, found without encoding, which takes half a minute for
        10 MB: no token stands for more bytes than the longest one. 0 where that does not hold.
        """
        if self._longest is None:
            return 0
        normalizer = self._backend.normalizer
        data = (text if normalizer is None else normalizer.normalize_str(text)).encode(errors="replace")
        if self._byte_level:  # bytes that have no token are left out
            tokens = self._backend.get_vocab(with_added_tokens=False)
            data = data.translate(None, bytes(byte for char, byte in _BYTES.items() if char not in tokens))
        return len(data) // self._longest

    @cached_property
    def _longest(self) -> int | None:
        """Bytes of the longest token; None where a token may stand for any number of them."""
        tokens = self._backend.get_vocab(with_added_tokens=False)
        model = self._backend.model
        added = self._backend.get_added_tokens_decoder().values()
        fused = getattr(model, "fuse_unk", False) and not getattr(model, "byte_fallback", False)
        if fused or any(token.lstrip or token.rstrip for token in added):
            return None
        stand_ins = re.compile(f"[{re.escape(''.join(_BYTES))}]*") if self._byte_level else re.compile("")
        lengths = (len(text) if stand_ins.fullmatch(text) else len(text.encode()) for text in tokens)
        return max([1, *lengths, *map(len, self._added.values())])

    def token_bytes(self, id: int) -> bytes:
        """The bytes that a token stands for; not always whole characters."""
        if id in self._added:
            return self._added[id]
        token = self._backend.id_to_token(id) if 0 <= id < self.vocab_size else None
        if token is None:
            raise BimetalError(f"token id {id} is not in the vocabulary of {self.vocab_size} tokens")
        if not self._byte_level:
            byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)
            return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()
        if all(char in _BYTES for char in token):
            return bytes(_BYTES[char] for char in token)
        return token.encode()

    def decode(self, ids: Iterable[int] | int, skip_special_tokens: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. `skip_special_tokens` leaves control tokens out."""
        decoder = self.decoder(skip_special_tokens)
        return "".join([decoder.push(id) for id in ([ids] if isinstance(ids, int) else ids)]) + decoder.flush()

    def decoder(self, skip_special_tokens: bool = False) -> "Decoder":
        return Decoder(self, skip_special_tokens)


def _check_text(text: str) -> None:
    """Refuse what the package cannot encode. Raises BimetalError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        at = error.start
        raise BimetalError(f"the text has half a surrogate pair, {text[at]!r}, at position {at}") from None
    if len(text) >= _MAX_SPACES and re.search(rf"\s{{{_MAX_SPACES}}}", text):
        raise BimetalError(f"the text has {_MAX_SPACES} characters of white space in a row; fewer are supported")


class Decoder:
    """Text of a growing sequence of ids: the pieces that `push` and `flush` return join to `Tokenizer.decode`."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = False):
        self._tokenizer = tokenizer
        self._skip = tokenizer._special if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = tokenizer._strips_space

    def push(self, id: int) -> str:
        """The whole characters that `id` completes; "" while a character is unfinished."""
        if id in self._skip:
            return ""
        return self._strip(self._utf8.decode(self._tokenizer.token_bytes(id)))

    def flush(self) -> str:
        """Ends the sequence: U+FFFD if a character stayed unfinished, else ""."""
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if self._at_start and text:  # SentencePiece puts a space in front when it encodes
            self._at_start = False
            return text.removeprefix(" ")
        return text


def load_tokenizer(path: str | Path, config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a checkpoint: from `config` if that is GGUF metadata, else from the files in the folder `path`.

    config  GGUF metadata ("tokenizer.ggml.model", ...) or the contents of config.json
    """
    if "tokenizer.ggml.model" in config:
        try:
            return _from_gguf(config)
        except BimetalError as error:
            raise BimetalError(f"{path}: {error}") from None
    folder = Path(path)
    return _from_folder(folder if folder.is_dir() else folder.parent, config)


def _from_gguf(config: Mapping[str, Any]) -> Tokenizer:
    """Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; defaults where a key is absent: llama.cpp."""

    def get(key: str, kind: type, default: Any = ...) -> Any:
        value = config.get(f"tokenizer.ggml.{key}", default)
        if value is ...:
            raise BimetalError(f"tokenizer.ggml.{key} is missing")
        if value is not None and not isinstance(value, kind):
            raise BimetalError(f"tokenizer.ggml.{key} is {value!r:.60}, not a {kind.__name__}")
        return value

    def get_list(key: str) -> list:
        value = get(key, object)
        value = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(value, list):
            raise BimetalError(f"tokenizer.ggml.{key} is {value!r:.60}, not a list")
        return value

    def get_id(key: str) -> int | None:
        id = get(f"{key}_token_id", int, None)
        if id is not None and not 0 <= id < len(tokens):
            raise BimetalError(f"tokenizer.ggml.{key}_token_id is {id}, but there are {len(tokens)} tokens")
        return id

    def around(name: str, id: int | None, default: bool) -> list[int]:
        added = get(f"add_{name}_token", bool, None)
        if added and id is None:
            raise BimetalError(f"tokenizer.ggml.add_{name}_token is true, but there is no {name}_token_id")
        return [id] if id is not None and (default if added is None else added) else []

    model = get("model", str)
    tokens, types = get_list("tokens"), get_list("token_type")
    if len(types) != len(tokens):
        raise BimetalError(f"there are {len(tokens)} tokens but {len(types)} entries in tokenizer.ggml.token_type")
    try:
        if model == "gpt2":
            name = get("pre", str)
            if name not in _PRE:
                raise BimetalError(f"tokenizer.ggml.pre is {name!r}; supported: {', '.join(sorted(_PRE))}")
            backend, add_bos = _byte_level_bpe(tokens, get_list("merges"), _PRE[name]), _PRE[name].add_bos
        elif model == "llama":
            prefix_space = get("add_space_prefix", bool, True)
            backend, add_bos = _sentencepiece_bpe(tokens, get_list("scores"), types, prefix_space), True
        else:
            raise BimetalError(f"tokenizer.ggml.model is {model!r}; supported: gpt2 (byte-level BPE), llama")
        backend.add_tokens(
            [
                AddedToken(token, special=type != _USER_DEFINED, normalized=False)
                for token, type in zip(tokens, types, strict=True)
                if type in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token
            ]
        )
    except BimetalError:
        raise
    except Exception as error:  # the package raises plain Exception, TypeError and ValueError
        raise BimetalError(f"the vocabulary cannot be used: {error}") from None

    bos, eos = get_id("bos"), get_id("eos")
    templates = {}
    for key, source in config.items():
        if key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template."):
            if not isinstance(source, str):
                raise BimetalError(f"{key} is {source!r:.60}, not text")
            templates[key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default"] = source
    return Tokenizer(
        backend,
        prefix=around("bos", bos, add_bos),
        suffix=around("eos", eos, False),
        bos_id=bos,
        eos_id=eos,
        end_ids=[id for id in (get_id("eot"), get_id("eom")) if id is not None],
        chat_templates=templates,
    )


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


def _removes_first_space(decoder: dict[str, Any]) -> bool:
    """Whether a decoder, in the form that tokenizer.json gives it, drops the space that encoding put in front."""
    parts = decoder.get("decoders", [decoder])
    return any(
        (part["type"] == "Strip" and part["content"] == " " and part["start"] > 0)
        or (part["type"] == "Metaspace" and part.get("prepend_scheme") != "never")
        for part in parts
    )


def _from_folder(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise BimetalError(f"{folder} has no tokenizer.json, the only form of tokenizer that is supported")
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the package raises plain Exception
        raise BimetalError(f"{file} cannot be read: {error}") from None
    settings = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
    generation = _read_json(folder / "generation_config.json")

    def declared(name: str) -> list[int]:
        """Ids of "bos" or "eos" from every file that names one, the tokenizer's own first."""
        token = settings.get(f"{name}_token")
        if isinstance(token, dict):
            token = token.get("content")
        ids = [backend.token_to_id(token)] if isinstance(token, str) else []
        for source in (generation, config):
            value = source.get(f"{name}_token_id")
            ids += value if isinstance(value, list) else [value]
        return [id for id in ids if isinstance(id, int)]

    bos, eos = declared("bos"), declared("eos")
    # What the post-processor puts around a text is the file's own word on bos; an explicit setting overrides it.
    plain, full = backend.encode("a", add_special_tokens=False).ids, backend.encode("a").ids
    at = next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), 0)
    prefix, suffix = full[:at], full[at + len(plain) :]
    if settings.get("add_bos_token") is not None:
        prefix = bos[:1] if settings["add_bos_token"] else []
    return Tokenizer(
        backend,
        prefix=prefix,
        suffix=suffix,
        bos_id=bos[0] if bos else None,
        eos_id=eos[0] if eos else None,
        end_ids=eos,
        chat_templates=_folder_templates(folder, settings),
    )


def _folder_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Where a Hugging Face folder may keep chat templates; a later place overrides an earlier one."""
    templates: dict[str, Any] = {}
    for source in (settings, _read_json(folder / "chat_template.json")):
        found = source.get("chat_template", [])
        for entry in found if isinstance(found, list) else [{"name": "default", "template": found}]:
            if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "template")):
                raise BimetalError(f"{folder} has a chat template that is not text: {entry!r:.80}")
            templates[entry["name"]] = entry["template"]
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = _read_text(file)
    if (file := folder / "chat_template.jinja").is_file():
        templates["default"] = _read_text(file)
    return templates


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BimetalError(f"{file} is not UTF-8: {error.reason} at byte {error.start}") from None


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(_read_text(file))
    except (json.JSONDecodeError, RecursionError) as error:
        raise BimetalError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BimetalError(f"{file} holds a {type(value).__name__}, not an object")
    return value
