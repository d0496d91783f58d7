"""Flags that several commands share. Imports nothing heavy, so that `--help` is fast."""

import argparse
import re
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import takewhile
from typing import Any, NoReturn

from common.decoders import DECODERS, ORDERS, PRESETS
from common.errors import UsageError
from common.options import (
    CACHE_SHORTHANDS,
    CACHE_TYPES,
    MOST_DRAFTED,
    CacheChoice,
    ExpertChoice,
    PrefixChoice,
)
from generate import values

SHORT = re.compile(r"-[a-z]{1,4}(-[a-z]+)?")  # a flag of one dash; longer words are a flag with its value, as in -mdemo
NEGATIVE = re.compile(r"-(\.?\d|inf)")  # the beginning of a value, such as -1GB and -1,2, where no flag has a digit
BACKENDS = ("cuda", "mlx", "numpy")
COMPRESSION = ("off", "auto", "always")
DEFAULT_MODEL = "demo"
FOREIGN_FLAGS = {  # what flags of llama.cpp, mlx-lm and vLLM are here
    **dict.fromkeys(("-ngl", "--n-gpu-layers", "--gpu-layers"), "leave it out: a GPU holds the whole model"),
    **dict.fromkeys(("-t", "--threads"), "leave it out: all cores are used"),
    **dict.fromkeys(("-fa", "--flash-attn"), "leave it out: there is no other attention to choose"),
    **dict.fromkeys(("--alias", "--served-model-name"), "leave it out: every name in a request means the served model"),
    **dict.fromkeys(("--mlock", "--mmap", "--no-mmap"), "leave it out: files are always mapped into memory"),
    **dict.fromkeys(
        ("-b", "--batch-size", "-ub", "--ubatch-size"), "leave it out: steps have the size that suits them"
    ),
    **dict.fromkeys(("--dtype", "--quantization"), "leave it out: the model's files state the formats of weights"),
    **dict.fromkeys(("-i", "--interactive", "--interactive-first"), "it is --chat"),
    **dict.fromkeys(("-no-cnv", "--no-conversation", "--ignore-chat-template"), "it is --raw"),
    **dict.fromkeys(("-v", "--verbose"), "--stats prints figures"),
    **dict.fromkeys(("-ncmoe", "--n-cpu-moe", "-cmoe", "--cpu-moe", "-ot", "--override-tensor"), "it is --spark"),
    **dict.fromkeys(("-mg", "--main-gpu"), "it is --devices N"),
    **dict.fromkeys(("-ts", "--tensor-split"), "it is --split X,X"),
    **dict.fromkeys(("--prompt-cache", "--prompt-cache-file"), "it is --cache-dir DIR"),
    **dict.fromkeys(
        ("--reasoning-budget", "--chat-template-kwargs"),
        "--think and --no-think turn reasoning on and off, --reasoning-effort says how much",
    ),
    **dict.fromkeys(
        ("--mirostat", "--typical", "--xtc-probability", "--dry-multiplier"), "it is not supported: try --min-p"
    ),
    **dict.fromkeys(("--lora-scaled", "--lora-modules"), "it is --adapter NAME, or --adapter NAME=X for a scale"),
    "--enable-lora": "leave it out: --adapter NAME is enough",
    "--mmproj": "images are not supported",
    "--hf-file": "it is -hf owner/repo/FILE",
    "--trust-remote-code": "leave it out: no code of a repository is run",
    "--stream": "leave it out: replies are always streamed",
    "--jinja": "leave it out: the model's chat template is always used",
    "--max-model-len": "it is --ctx N",
    "--max-num-seqs": "it is --parallel N",
    "--tensor-parallel-size": "it is --tensor-parallel N",
    "--gpu-memory-utilization": "it is --memory SIZE",
}
MODEL_HELP = "GGUF file, safetensors folder, owner/repo, owner/repo:Q4_K_M, demo, demo-wedlm, or smollm2"

# Names of options: of a model when it is loaded, and of a reply.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
SPECULATION = ("spec", "tree_budget", "tree_topk", "chain_seed")
WINDOW = DECODERS["wedlm"].takes
CACHE = tuple(CacheChoice.__dataclass_fields__)
EXPERTS = tuple(ExpertChoice.__dataclass_fields__)
PREFIX = tuple(PrefixChoice.__dataclass_fields__)
PLACES = ("devices", "split", "draft_device", "tensor_parallel")
BOUNDS = ("attention_window", "max_kv_size")
LOAD = ("backend", "ctx", "parallel", "draft", "adapter", "reranker", *BOUNDS, *PLACES, *CACHE, *EXPERTS, *PREFIX)
OPTIONS = (*SAMPLING, "seed", "max_tokens", "stop", *SPECULATION, *WINDOW)  # of LLM.stream


class Once(argparse.Action):
    """Stores a value, and refuses a second one."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        _store_once(self, namespace, values)


class Switch(argparse.BooleanOptionalAction):
    """Stores True for --NAME and False for --no-NAME, and refuses a second one."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        _store_once(self, namespace, not str(option_string).startswith("--no-"))


def _store_once(action: argparse.Action, namespace: Any, value: Any) -> None:
    given = namespace.__dict__.setdefault("_given", set())
    if action.dest in given:
        raise argparse.ArgumentError(action, "is given more than once")
    given.add(action.dest)
    setattr(namespace, action.dest, value)


class Parser(argparse.ArgumentParser):
    """Reads flags, and refuses what argparse would take for something else.

    hints  what to give in place of flags of other commands or programs, by flag
    """

    def __init__(self, *args: Any, **options: Any):
        options.setdefault("allow_abbrev", False)
        super().__init__(*args, **options)
        self.hints = dict(FOREIGN_FLAGS)
        self.register("action", None, Once)
        self._negative_number_matcher = NEGATIVE

    def error(self, message: str) -> NoReturn:
        names, _, what = message.removeprefix("argument ").partition(": ")
        if what == "expected one argument":
            message += f"; a value that begins with - goes after =, as in {names.split('/')[-1]}=-x"
        raise UsageError(f"{message}; see {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but let the last, optional word follow flags, and refuse what a command lacks.

        argparse takes such a word for left out as soon as a flag follows the word before it.
        """
        if self._subparsers is None:
            self.refuse_unknown(args or ())
        found, rest = super().parse_known_args(args, namespace)
        last = next((action for action in reversed(self._actions) if not action.option_strings), None)
        if rest and last and last.nargs == "?" and not rest[0].startswith("-") and getattr(found, last.dest) is None:
            setattr(found, last.dest, rest.pop(0))
        if rest and self._subparsers is None:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest

    def _print_message(self, message: str, file: Any = None) -> None:
        """Write help; raises OSError if the disk is full, which argparse ignores."""
        stream = file or sys.stderr
        stream.write(message)
        stream.flush()

    def refuse_unknown(self, words: Iterable[str]) -> None:
        """Refuse a flag that is none of this parser's.

        argparse would take its value for a command, and -ngl for -n with the value gl.
        """
        takes_value = False
        for word in takewhile(lambda word: word != "--", words):
            flag = word.partition("=")[0]
            action = self._option_string_actions.get(flag)
            if action is None and not takes_value and (flag.startswith("--") or SHORT.fullmatch(flag)):
                near = get_close_matches(flag, self._option_string_actions, 1, 0.8)
                hint = self._hint(flag) or (f"did you mean {near[0]}?" if near else None)
                self.error(f"unrecognized arguments: {flag}{f'; {hint}' if hint else ''}")
            takes_value = action is not None and action.nargs is None and word == flag

    def _hint(self, flag: str) -> str | None:
        """Return what a flag of another program is here; None where this parser lacks what the hint names."""
        hint = self.hints.get(flag, "")
        return hint if set(re.findall(r"(?<!\S)--[\w-]+", hint)) <= self._option_string_actions.keys() else None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            self.error(f"{value!r:.80} is neither a flag nor the value of one; a text with spaces goes in quotes")
        super()._check_value(action, value)


def cache(p: Parser) -> None:
    g = p.add_argument_group("KV cache (smaller formats are LOSSY; docs/kv-cache.md has measured losses)")
    types = f"{', '.join(CACHE_TYPES)} (default: the backend's own float type)"
    g.add_argument(
        "--cache-type-k", "-ctk", type=str.lower, choices=CACHE_TYPES, metavar="TYPE", help=f"format of keys: {types}"
    )
    g.add_argument(
        "--cache-type-v", "-ctv", type=str.lower, choices=CACHE_TYPES, metavar="TYPE", help="format of values, as -ctk"
    )
    g.add_argument(
        "--kv",
        type=str.lower,
        choices=CACHE_SHORTHANDS,
        help="formats of both: q8 (q8_0), q4 (lm4), tq3 (tq3_0), or auto: the widest formats with which the context "
        "fits into memory",
    )
    for axis, name in (("k", "keys"), ("v", "values")):
        g.add_argument(
            f"--kv-rotate-{axis}", action=Switch, help=f"rotate {name} before they are encoded (default: by format)"
        )
    g.add_argument("--kv-sinks", type=values.count, metavar="N", help="first tokens kept exactly (default: by format)")
    g.add_argument(
        "--kv-recent", type=values.count, metavar="N", help="latest tokens kept exactly (default: by format)"
    )
    g.add_argument(
        "--kv-calibration",
        type=values.count,
        metavar="N",
        help="number of first tokens that calibrate keys and are kept exactly (default: 512 with keys below 8 bits)",
    )
    g.add_argument(
        "--kv-boundary", type=values.count, metavar="N", help="first N and last N layers in q8_0 (default: 0)"
    )


def experts(p: Parser) -> None:
    g = p.add_argument_group("mixtures of experts larger than memory (the text does not change)")
    g.add_argument(
        "--stream-experts",
        action="store_true",
        default=None,
        help="keep some experts in memory, read the others from disk while decoding",
    )
    expert_memory(g)
    g.add_argument(
        "--expert-pack",
        metavar="FILE",
        help="read experts from this file, written by `pack` (default: from the model's files)",
    )
    g.add_argument(
        "--expert-profile",
        type=values.file,
        metavar="FILE",
        help="counts of the uses of each expert, such as model.gguf.spark.csv: read at the start, written at the end",
    )
    g.add_argument(
        "--spark",
        action="store_true",
        default=None,
        help="on CUDA: keep all experts in host memory, and the most used in VRAM as well",
    )
    g.add_argument("--expert-vram", metavar="SIZE", help="VRAM for experts, such as 10GB (default: all that is left)")


def expert_memory(g: Any) -> None:
    g.add_argument(
        "--expert-cache",
        metavar="SIZE",
        help="memory for experts, such as 8GB (default: a quarter of the machine's memory)",
    )
    g.add_argument(
        "--memory", metavar="SIZE", help="limit of memory, on CUDA of each GPU, such as 16GB (default: what is free)"
    )


def prefixes(p: Parser) -> None:
    g = p.add_argument_group("prefix cache (reuses the common beginning of prompts; the text does not change)")
    g.add_argument(
        "--cache-memory",
        metavar="SIZE",
        help="host memory for saved states of prompts, such as 4GB; 0: none (default: a tenth of free memory, at most "
        "8GiB)",
    )
    g.add_argument(
        "--cache-dir", type=values.folder, metavar="DIR", help="also save states in this folder, for later runs"
    )
    g.add_argument("--cache-disk", metavar="SIZE", help="limit of --cache-dir (default: 20GB)")


def compression(p: Parser) -> None:
    g = p.add_argument_group("prompt compression (lossy: the model reads only parts of a long prompt)")
    g.add_argument(
        "--prefill-compression",
        choices=COMPRESSION,
        default="off",
        help="auto: compress prompts of at least --prefill-threshold tokens; always: all prompts; never "
        "those with tools, or of which half is cached (default: off)",
    )
    g.add_argument(
        "--prefill-drafter", metavar="MODEL", help=f"the model whose attention chooses the parts: {MODEL_HELP}"
    )
    g.add_argument(
        "--prefill-keep-ratio",
        type=values.ratio,
        metavar="X",
        help="share of a prompt that is kept, above 0 and at most 1 (default: 0.05)",
    )
    g.add_argument(
        "--prefill-curve",
        type=values.curve,
        metavar="N:X,...",
        help="share by prompt length, interpolated between points such as 8000:0.3,64000:0.05",
    )
    g.add_argument(
        "--prefill-threshold",
        type=values.positive,
        metavar="N",
        help="least prompt tokens for auto (default: 32000)",
    )
    g.add_argument(
        "--prefill-upstream-base",
        type=values.base,
        metavar="URL",
        help="load no model: send compressed prompts to the server at URL",
    )
    g.add_argument(
        "--prefill-upstream-model", metavar="NAME", help="model to request from that server (default: the client's)"
    )
    g.add_argument(
        "--prefill-upstream-key-file", metavar="FILE", help="file with that server's key (or BIMETAL_UPSTREAM_KEY)"
    )


def adapters(p: Any) -> None:
    p.add_argument(
        "--adapter",
        "--lora",
        "--adapter-path",
        dest="adapter",
        type=values.words,
        action="append",
        metavar="ADAPTER",
        help="LoRA adapter to add to the model: a folder of PEFT or mlx-lm, a GGUF file, or owner/repo; ADAPTER=X "
        "multiplies it by X; repeatable",
    )


def named_model(p: Parser) -> None:
    p.add_argument("named", nargs="?", metavar="MODEL", help=MODEL_HELP)
    p.add_argument("-m", "--model", metavar="MODEL", help="MODEL as a flag")


def sampling(p: Parser) -> None:
    s = p.add_argument_group(
        "sampling (penalties, temperature, top-k, top-p, min-p, in that order)",
        "A flag that is left out takes the value that the model's files recommend, else the default given here.",
    )
    s.add_argument("--temperature", "--temp", type=values.number, metavar="X", help="0 is greedy (default)")
    s.add_argument("--top-p", type=values.number, metavar="X", help="share of probability kept (default: 1)")
    s.add_argument("--top-k", type=values.count, metavar="N", help="number of tokens kept; 0 keeps all (default)")
    s.add_argument(
        "--min-p", type=values.number, metavar="X", help="drop tokens below this share of the best one (default: 0)"
    )
    s.add_argument(
        "--repetition-penalty", "--repeat-penalty", type=values.number, metavar="X", help="1 is none (default)"
    )
    s.add_argument(
        "--frequency-penalty", type=values.number, metavar="X", help="subtracted per occurrence (default: 0)"
    )
    s.add_argument("--presence-penalty", type=values.number, metavar="X", help="subtracted once per token (default: 0)")
    s.add_argument(
        "-s", "--seed", type=values.seed, metavar="N", help="the same seed gives the same text; -1: random (default)"
    )


def max_tokens(p: Any) -> None:
    p.add_argument(
        "-n",
        "--predict",
        "--n-predict",
        "--max-tokens",
        dest="max_tokens",
        type=values.limit,
        metavar="N",
        help="limit of a reply; -1: none but the context (default)",
    )


def parallel(p: Any) -> None:
    p.add_argument(
        "-np",
        "--parallel",
        type=values.positive,
        metavar="N",
        help="replies generated at the same time (default: 8; on CUDA 4; with mlx-lm 1)",
    )


def speculation(p: Any) -> None:
    draft(
        p,
        "mtp (the model's own multi-token-prediction block), demo, or a DFlash, DSpark or EAGLE-3 draft, named as a "
        "model",
    )
    p.add_argument(
        "--spec",
        choices=tuple(DECODERS),
        help="; ".join(f"{row.name}: {row.meaning}" for row in DECODERS.values())
        + " (default: tree with a DFlash or DSpark draft, chain with mtp and EAGLE-3, wedlm with a WeDLM model, "
        "else off)",
    )
    p.add_argument(
        "--tree-budget",
        type=values.budget,
        metavar="N",
        help=f"draft tokens per step, at most {MOST_DRAFTED}, or auto: chosen by measured speed (default)",
    )
    p.add_argument(
        "--tree-topk", type=values.positive, metavar="N", help="candidates of a tree at each position (default: 8)"
    )
    p.add_argument(
        "--chain-seed", action="store_true", default=None, help="begin each tree with the draft's most probable chain"
    )


def window(p: Any) -> None:
    presets = "; ".join(f"{name}: {preset.words}" for name, preset in PRESETS.items())
    p.add_argument(
        "--wedlm-preset",
        choices=tuple(PRESETS),
        help=f"window, tau and lambda: {presets} (default: as calibrated, else balanced)",
    )
    p.add_argument("--wedlm-window", type=values.positive, metavar="N", help="masks per step (default: as the preset)")
    p.add_argument(
        "--wedlm-tau",
        type=values.number,
        metavar="X",
        help="entropy in nats below which masks are filled; 0: one mask per step (default: as the preset)",
    )
    p.add_argument(
        "--wedlm-lambda",
        type=values.number,
        metavar="X",
        help="nats added per position after the first mask (default: as the preset)",
    )
    p.add_argument(
        "--wedlm-verify",
        action="store_true",
        default=None,
        help="confirm each token, so that the text is that of greedy decoding without windows",
    )
    p.add_argument(
        "--wedlm-sure",
        type=values.number,
        metavar="X",
        help="entropy in nats from which a filled mask is confirmed by the next-token logits (default: as the preset)",
    )
    p.add_argument(
        "--wedlm-order",
        choices=ORDERS,
        help="streaming: a full window of masks in each step; paper: filled positions count (default: streaming)",
    )


def model(p: Any, backends: tuple[str, ...] = BACKENDS) -> None:
    p.add_argument(
        "-m",
        "-hf",
        "--hf-repo",
        "--model",
        dest="model",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help=f"{MODEL_HELP} (default: demo)",
    )
    p.add_argument(
        "-c",
        "--ctx-size",
        "--ctx",
        dest="ctx",
        type=values.context,
        metavar="N",
        help="most tokens of prompt and reply together; 0: as trained, on CUDA at most what fits (default)",
    )
    backend(p, backends)


def backend(p: Any, backends: tuple[str, ...] = BACKENDS) -> None:
    p.add_argument("--backend", choices=backends, help="default: the fastest that this machine can run")
    p.add_argument(
        "--devices",
        type=values.indices,
        metavar="N,N",
        help="numbers of the NVIDIA GPUs, as `devices` prints them; the layers are divided in this order (default: 0)",
    )
    p.add_argument(
        "--split",
        type=values.numbers,
        metavar="X,X",
        help="proportions of the model's bytes on --devices, such as 1,3 (default: those of free memory)",
    )
    p.add_argument(
        "--tensor-parallel",
        type=values.positive,
        metavar="N",
        help="divide every layer among N --devices, or for a prompt, --chat and serve among N processes of mlx.launch "
        "or torchrun (default: divide by layers)",
    )


def draft(p: Any, help: str) -> None:
    p.add_argument("-md", "--model-draft", "--draft", dest="draft", metavar="DRAFT", help=help)
    p.add_argument(
        "--draft-device",
        type=values.count,
        metavar="N",
        help="number of the GPU for the draft (default: the last of --devices)",
    )
