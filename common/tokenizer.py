"""Tokenizer: text to token ids and back, from a GGUF file's metadata or a Hugging Face folder.

The work is done by the `tokenizers` package, whose tokenizer common/gguf_tokenizer.py or common/folder_tokenizer.py
makes; this module finds the special ids, and decodes bytes, not strings, so that a character divided among tokens
is shown as a whole.
"""

import codecs
import json
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as Backend

from common.encoded_parts import EncodedParts, cuts_of
from common.errors import BimetalError, PromptTooLongError, UsageError, shown
from common.fim import find_fim
from common.folder_tokenizer import from_folder
from common.gguf_tokenizer import from_gguf

if TYPE_CHECKING:
    from common.chat import ChatPrompt
# Tokens that end a reply in the families we run; files often declare only one of theirs.
_END_TOKENS = (
    *("<|im_end|>", "<|endoftext|>"),  # Qwen, SmolLM
    *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>"),  # Llama
    *("<|user|>", "<|observation|>"),  # GLM
    *("</assistant>", "〈|EOS|〉"),  # Laguna
    "<end_of_turn>",  # Gemma
    *("<|return|>", "<|call|>"),  # gpt-oss, whose <|end|> ends a message of several in a reply
)

_MAX_SPACES = 1 << 20  # in a row; the package's regular expressions give up at ten times as many


def _byte_alphabet() -> dict[str, int]:
    """Map bytes to GPT-2's printable characters: 33-126, 161-172 and 174-255 to themselves, others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_alphabet()


class Tokenizer:
    """A vocabulary with `encode`, `decode`, and the special tokens that a generation loop needs.

    vocab_size      ids 0..vocab_size-1 have a text; a model may have more logits (padding), which have none
    bos_id, eos_id  int or None
    end_ids         ids that end a reply
    add_bos         encode(add_special_tokens=True) starts with bos_id
    chat_templates  Jinja sources by name: "default", sometimes "tool_use" and others
    fim             FimTokens; in `__init__` ids that the files state for some of its fields
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
        fim: Mapping[str, int | None] | None = None,
    ):
        added = backend.get_added_tokens_decoder()
        decoder = "" if backend.decoder is None else backend.decoder.__getstate__().decode()
        if "ByteLevel" not in decoder and "ByteFallback" not in decoder and "Metaspace" not in decoder:
            raise BimetalError(
                f"the tokenizer decodes with {decoder or 'nothing'}; byte-level BPE and SentencePiece are supported"
            )
        backend.no_padding()  # a file may hold settings of training
        backend.no_truncation()
        self._backend = backend
        self._lock = Lock()  # parse_special is a setting of the backend, not an argument
        self._added = {id: token.content.encode() for id, token in added.items()}
        self._whole: dict[int, str | None] = {}  # results of `whole_text`
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
        self.fim = find_fim(self.token_to_id, fim or {})
        self._control = self._special | ((self.end_ids | self.fim.ids) & added.keys())
        cuts = cuts_of(added, self._control) if self._byte_level else None
        self._parts = None if cuts is None else EncodedParts(cuts, self._encode_all)
        self.add_bos = bos_id is not None and self._prefix[:1] == [bos_id]
        self.chat_templates = dict(chat_templates or {})

    def __len__(self) -> int:
        return self.vocab_size

    def __repr__(self) -> str:
        return f"<Tokenizer: {self.vocab_size} tokens>"

    @property
    def vocab(self) -> dict[str, int]:
        """Return ids by token, in the spelling of the tokenizer's files."""
        vocab: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return vocab

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    @property
    def is_busy(self) -> bool:
        """Test whether a thread encodes a text, so that others would wait."""
        return self._lock.locked()

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Encode `text` to token ids.

        add_special_tokens  prepend bos (or the model's equivalent), unless the text starts with it
        parse_special       encode control tokens that are spelled out in the text as their ids; turn it off for text
                            from untrusted sources. Tokens that a model declares as plain text, such as <think>, are one
                            id in both cases.
        """
        _check_text(text)
        with self._lock, _without_panic():
            self._backend.encode_special_tokens = not parse_special
            ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if not add_special_tokens:
            return ids
        head = [] if ids[: len(self._prefix)] == self._prefix else self._prefix
        return head + ids + self._suffix

    @property
    def prompt_head(self) -> list[int]:
        """Return the ids with which `encode` begins every prompt: bos, or none."""
        return list(self._prefix)

    @property
    def prompt_tail(self) -> list[int]:
        """Return the ids with which `encode` ends every prompt: none, or of models of embeddings the end token."""
        return list(self._suffix)

    @property
    def control_ids(self) -> frozenset[int]:
        """Return the ids of control tokens."""
        return self._control

    @property
    def control_tokens(self) -> list[str]:
        """Return the texts of control tokens, ordered by id: those marked as special, that end a reply, or of `fim`."""
        return [self._added[id].decode() for id in sorted(self._control)]

    def encode_and_find(self, text: str, parse_special: bool = True) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Return the ids of `text`, without bos, and start, end and id of each control token in it."""
        _check_text(text)
        with self._lock, _without_panic():
            self._backend.encode_special_tokens = not parse_special
            if parse_special and self._parts is not None and (cut := self._parts.find(text)) is not None:
                return cut[0], [token for token in cut[1] if token[2] in self._control]
            (found,) = self._backend.encode_batch([text], add_special_tokens=False)  # which leaves the interpreter free
        ids: list[int] = found.ids
        return ids, [(*span, id) for id, span in zip(ids, found.offsets, strict=True) if id in self._control]

    def _encode_all(self, texts: list[str]) -> list[list[int]]:
        return [found.ids for found in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_plain(self, text: str) -> list[int]:
        """Encode `text` to ids, none of which is a control token.

        Some files do not mark the token that ends a reply as special; if `text` spells it out, it is cut in two.
        """
        ids, left = list[int](), [text]
        while left:
            text = left.pop()
            found, control = self.encode_and_find(text, parse_special=False)
            cuts = [start + 1 for start, end, _ in control if end > start + 1]  # one character is unknown, and stays
            if cuts:
                left += [text[a:b] for a, b in pairwise([0, *cuts, len(text)])][::-1]
            else:
                ids += found
        return ids

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, **options: Any) -> "ChatPrompt":
        """Return the prompt of `messages`, as text and as token ids; options as in common.chat.chat_prompt."""
        from common.chat import chat_prompt  # Jinja is for chats alone

        return chat_prompt(self, messages, tools, **options)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None, tokenize: bool = True, **options: Any
    ) -> list[int] | str:
        """Render `messages` to token ids, or to text; options as in common.chat.chat_prompt."""
        prompt = self.chat_prompt(messages, tools, **options)
        return prompt.tokens if tokenize else prompt.text

    def check_fits(self, text: str, context: int) -> None:
        """Refuse a text that certainly has more than `context` tokens, without encoding it: PromptTooLongError."""
        if len(text) > context and (least := self.least_tokens(text)) > context:
            raise PromptTooLongError(
                f"the prompt has at least {least} tokens and the context holds {context}; shorten it or raise ctx",
                least,
                context,
            )

    def least_tokens(self, text: str) -> int:
        """Compute a lower bound on the tokens of `text` without encoding it, which takes half a minute for 10 MB.

        No token stands for more bytes than the longest one; 0 if a token may stand for any number of bytes.
        """
        if self._longest is None:
            return 0
        normalizer = self._backend.normalizer
        with _without_panic():
            data = (text if normalizer is None else normalizer.normalize_str(text)).encode(errors="replace")
        return len(data.translate(None, self._left_out)) // self._longest

    @cached_property
    def _left_out(self) -> bytes:
        """Return the bytes that have no token, which encoding omits."""
        tokens = self._backend.get_vocab(with_added_tokens=False) if self._byte_level else _BYTES
        return bytes(byte for char, byte in _BYTES.items() if char not in tokens)

    @cached_property
    def _longest(self) -> int | None:
        """Return the bytes of the longest token; None if a token may stand for any number of bytes."""
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
        """Return the bytes that a token stands for; not always whole characters."""
        if id in self._added:
            if self._byte_level or id in self._special:
                return self._added[id]
            return self._added[id].replace("▁".encode(), b" ")  # runs of spaces, such as Gemma's
        token = self._backend.id_to_token(id) if 0 <= id < self.vocab_size else None
        if token is None:
            raise BimetalError(f"token id {id} is not in the vocabulary of {self.vocab_size} tokens")
        if not self._byte_level:
            byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)
            return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()
        if all(char in _BYTES for char in token):
            return bytes(_BYTES[char] for char in token)
        return token.encode()

    def whole_text(self, id: int) -> str | None:
        """Return the text of a token of whole characters, found once; None for one that holds a part of a character."""
        if id not in self._whole:
            try:
                self._whole[id] = self.token_bytes(id).decode()
            except UnicodeDecodeError:
                self._whole[id] = None
        return self._whole[id]

    def decode(self, ids: Iterable[int] | int, skip_special_tokens: bool = False) -> str:
        """Decode `ids` to text; bytes that are not UTF-8 become U+FFFD. `skip_special_tokens` omits control tokens."""
        decoder = self.decoder(skip_special_tokens)
        return "".join([decoder.push(id) for id in _whole_numbers(ids)]) + decoder.flush()

    def decoder(self, skip_special_tokens: bool = False) -> "Decoder":
        return Decoder(self, skip_special_tokens)


def _whole_numbers(ids: Any) -> list[int]:
    """Return one token id, or each of several, as plain integers; raises UsageError for anything else."""
    several = ids if isinstance(ids, Iterable) and not isinstance(ids, str | bytes) else [ids]
    try:
        return [operator.index(id) for id in several]
    except TypeError:
        raise UsageError(f"the ids to decode are {shown(ids)}; they must be a token id or a list of them") from None


def _check_text(text: str) -> None:
    """Refuse text that the package cannot encode. Raises UsageError for other types, else BimetalError."""
    if not isinstance(text, str):
        raise UsageError(f"the text to encode is {shown(text)}; it must be a str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        at = error.start
        raise BimetalError(f"the text has half a surrogate pair, {text[at]!r}, at position {at}") from None
    if len(text) >= _MAX_SPACES and re.search(rf"\s{{{_MAX_SPACES}}}", text):
        raise BimetalError(f"the text has {_MAX_SPACES} characters of white space in a row; fewer are supported")


@contextmanager
def _without_panic() -> Iterator[None]:
    """Raise BimetalError if the package panics, as it does if a regular expression of the file takes too long."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # which derives from BaseException, and has no public name
            raise
        raise BimetalError(f"the model's tokenizer fails on this text: {error}") from None


class Decoder:
    """Incremental decoder of ids: the pieces from `push` and `flush` join to the result of `Tokenizer.decode`."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = False):
        self._tokenizer = tokenizer
        self._skip = tokenizer._special if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = tokenizer._strips_space
        self._in_character = False  # whether bytes of an unfinished one are held

    def push(self, id: int) -> str:
        """Return the whole characters that `id` completes; "" while a character is unfinished."""
        if id in self._skip:
            return ""
        text = None if self._in_character else self._tokenizer.whole_text(id)
        if text is None:
            text = self._utf8.decode(self._tokenizer.token_bytes(id))
            self._in_character = bool(self._utf8.getstate()[0])
        return self._strip(text) if self._at_start else text

    def flush(self) -> str:
        """End the sequence: return U+FFFD if a character is incomplete, else ""."""
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if self._at_start and text:  # SentencePiece puts a space in front when it encodes
            self._at_start = False
            return text.removeprefix(" ")
        return text


def _removes_first_space(decoder: dict[str, Any]) -> bool:
    """Test whether a decoder, as in tokenizer.json, drops the space that encoding put in front."""
    parts = decoder.get("decoders", [decoder])
    return any(
        (part["type"] == "Strip" and part["content"] == " " and part["start"] > 0)
        or (part["type"] == "Metaspace" and part.get("prepend_scheme") != "never")
        for part in parts
    )


def load_tokenizer(path: str | Path, config: Mapping[str, Any]) -> Tokenizer:
    """Load the tokenizer of a checkpoint, from `config` if it is GGUF metadata, else from files in the folder `path`.

    config  GGUF metadata ("tokenizer.ggml.model", ...) or the contents of config.json
    """
    path = Path(path)
    if "tokenizer.ggml.model" in config:
        try:
            backend, rest = from_gguf(config)
        except BimetalError as error:
            raise BimetalError(f"{path}: {error}") from None
    else:
        folder = path if path.is_dir() else path.parent
        if path.is_file() and not (folder / "tokenizer.json").exists():
            raise BimetalError(
                f"{path} has no tokenizer, and no tokenizer.json lies beside it; if it is a draft, name its model, and "
                "this as the draft"
            )
        backend, rest = from_folder(folder, config)
    return Tokenizer(backend, **rest)
