"""The commands of the command line, and what their flags must be together. Imports nothing heavy, for `--help`."""

import argparse
import os
import sys
from dataclasses import fields
from typing import Any

from common.decoders import DECODERS
from common.errors import UsageError
from common.options import (
    CACHE_SHORTHANDS,
    CacheChoice,
    ExpertChoice,
    GenerationOptions,
    LoadOptions,
    PrefixChoice,
)
from generate import __version__, flags, values
from generate.bench_options import (
    JOBS,
    BenchOptions,
    ModelBench,
    ServeBench,
    SpecBench,
    StreamsBench,
    SyntheticBench,
    SyntheticSpecBench,
    SyntheticWindowBench,
)
from generate.flags import BACKENDS, MODEL_HELP, Parser

COMMANDS = {
    "list": "the downloaded models: name, files, size, last use",
    "pull": "download a model",
    "rm": "remove a downloaded model",
    "devices": "what was found on this machine, what is chosen and why",
    "inspect": "a model's architecture, shapes, block types, tokenizer and memory by context length",
    "bench": "prefill and decode speed at several context lengths, as a table",
    "perplexity": "how well a model predicts a text, and how far it is from a reference",
    "fit": "which of a model's files fit into memory, and with how much context",
    "quantize": "write a model in fewer bits, as an MLX folder or a GGUF file, or measure what that costs",
    "calibrate": "measure windows of a WeDLM model on a text, and keep the best one beside the model",
    "pack": "write a mixture's experts into one file, from which each is read at once",
    "plan": "predicted tokens per second: of a mixture whose experts are streamed, or of several machines",
    "batch": "answer the requests of a JSON Lines file, several at a time",
    "serve": "an HTTP server with the APIs of OpenAI, Anthropic and Ollama",
    "launch": "start a coding agent (codex, claude, opencode) on a running server",
    "selftest": "the conformance tests and a short bench on this machine, as a report to send us",
}
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
SPECULATION = ("spec", "tree_budget", "tree_topk", "chain_seed")
WINDOW = DECODERS["wedlm"].takes
CACHE = tuple(CacheChoice.__dataclass_fields__)
EXPERTS = tuple(ExpertChoice.__dataclass_fields__)
PREFIX = tuple(PrefixChoice.__dataclass_fields__)
PLACES = ("devices", "split", "draft_device")
LOAD = ("backend", "ctx", "parallel", "draft", "fa_window", "max_kv_size", *PLACES, *CACHE, *EXPERTS, *PREFIX)
OPTIONS = (*SAMPLING, "seed", "max_tokens", "stop", *SPECULATION, *WINDOW)  # of LLM.stream


def parse(argv: list[str]) -> argparse.Namespace:
    """The parsed arguments.

    command  a key of COMMANDS, or "prompt" or "chat"
    options  of these two, what LLM.stream takes of the flags that were given, checked; of bench, a BenchOptions
    load     of these two, what generate.load takes
    """
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        raise UsageError(f"{argv[0]!r} is not a command; commands: {', '.join(COMMANDS)}; a prompt goes after --prompt")
    if empty := next((flag for flag in argv if flag.startswith("--") and flag.endswith("=--")), None):
        raise UsageError(f"{empty[:-3]} has the value '--', which ends the flags; give another")
    end = argv.index("--") if argv[:1] == ["launch"] and "--" in argv else len(argv)
    args = _parser().parse_args(argv[:end])
    vars(args).pop("_given", None)
    if args.command is not None:
        if argv[0] != args.command:
            raise UsageError(f"the command {args.command} comes first, and its flags after it")
        _finish(args, argv[end + 1 :])
        return args
    args.command = "chat" if args.chat else "prompt"
    if args.chat and args.prompt is not None:
        raise UsageError("--chat and --prompt exclude each other; in a chat the prompt is typed")
    if args.chat and args.raw:
        raise UsageError("--chat and --raw exclude each other; a chat needs the model's template")
    if args.think is not None and args.raw:
        raise UsageError("--think and --raw exclude each other; thinking is a matter of the model's template")
    if args.system is not None and args.raw:
        raise UsageError("--system and --raw exclude each other; a system prompt needs the model's template")
    if not args.chat and args.prompt is None and sys.stdin.isatty():
        raise UsageError("no prompt: give --prompt TEXT, a prompt on stdin, or --chat")
    args.options = _given_options(args)
    args.load = _load_options(args)
    return args


def _given_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of generation among the flags that were given; refuses values that no model takes."""
    given = {name: getattr(args, name) for name in OPTIONS if getattr(args, name, None) is not None}
    GenerationOptions(**given)
    return given


def _load_options(args: argparse.Namespace) -> LoadOptions:
    """The options of loading among the flags of a command that has some or all of them."""
    given: dict[str, Any] = {name: getattr(args, name) for name in LOAD if hasattr(args, name)}
    if args.command in ("prompt", "chat"):
        given["parallel"] = 1  # so that others' states take no memory
    return LoadOptions(progress=True, **given)


def _finish(args: argparse.Namespace, rest: list[str]) -> None:
    """Check what argparse cannot: a model named once, and flags of one bench.

    rest  what follows `--`, for the program that is launched
    """
    if args.command == "quantize":
        _finish_quantize(args)
    if args.command in ("inspect", "perplexity", "calibrate", "fit", "pull", "rm"):
        if (args.model is None) == (args.named is None):
            many = "is named twice" if args.model else "is not named"
            raise UsageError(f"the model {many}; give it as MODEL or by --model")
        args.model = args.model or args.named
    if args.command in ("serve", "batch"):
        args.load = _load_options(args)
    if args.command == "batch":
        args.options = _given_options(args)
    if args.command == "launch":
        args.rest = rest
    if args.command == "bench":
        args.options = _bench_options(args)


def _parser() -> Parser:
    prog = "bimetal" if os.path.basename(sys.argv[0]) == "bimetal" else "python -m generate"
    p = Parser(
        prog=prog,
        usage=f"{prog} [flags]\n       {prog} COMMAND [flags]",
        description="Generate text with a local model.",
        epilog=f"{prog} COMMAND --help lists the flags of a command.",
    )
    p.add_argument("--version", action="version", version=f"bimetal {__version__}", help="print the version")
    _text(p)
    commands = p.add_subparsers(title="commands", dest="command", metavar="COMMAND", prog=prog, parser_class=Parser)
    add = {
        "list": lambda p: None,
        "pull": flags.named_model,
        "rm": _rm,
        "devices": lambda p: None,
        "inspect": _inspect,
        "bench": _bench,
        "perplexity": _perplexity,
        "fit": _fit,
        "quantize": _quantize,
        "calibrate": _calibrate,
        "pack": _pack,
        "plan": _plan,
        "batch": _batch,
        "serve": _serve,
        "launch": _launch,
        "selftest": _selftest,
    }
    for name, what in COMMANDS.items():
        add[name](commands.add_parser(name, help=what, description=DESCRIPTIONS.get(name, what)))
    return p


DESCRIPTIONS = {
    "list": "The models in the Hugging Face cache, whatever tool has downloaded them.",
    "pull": "Download a model into the Hugging Face cache, as --model does, and print its path.",
    "rm": "Remove a model from the Hugging Face cache, which other tools use too. owner/repo is all of a repository.",
    "serve": "Serve a model on this machine. Logs hold neither prompts nor keys.",
    "batch": "Answer the requests of IN, and write each answer as a line of OUT when it is finished. A run that was "
    "stopped goes on when the same command is given again. A line of IN is a request of OpenAI's batch API (custom_id, "
    'method, url, body), {"prompt": text} or {"messages": [...]}; docs/batching.md has the answers.',
    "pack": "Write a mixture's experts into one file, each in one piece, for --expert-pack. A run that was stopped "
    "goes on when the same command is given again.",
    "launch": "Start a coding agent with the settings that point it at a running server, for this run alone. What "
    "follows -- goes to the agent. The server's key, where it has one, is read from BIMETAL_API_KEY.",
    "quantize": "Write a model in fewer bits: OUT that ends in .gguf is a GGUF file, any other an MLX folder, which "
    "mlx-lm reads too. A run that was stopped goes on when the same command is given again.",
    "perplexity": "The perplexity of a model over a text, by llama-perplexity's convention: windows read from an empty "
    "state, the second half of each scored. Against a reference also KL divergence and agreement.",
    "calibrate": "Decode replies with a grid of windows, and measure the share of tokens that plain greedy decoding "
    "would have chosen, and tokens per forward. The window of most tokens per forward within --loss is kept in a file "
    "beside the model, and is the default of its replies from then on.",
    "fit": "What a model takes in memory, by file and context, while a prompt of the whole context is read. Of a "
    "repository on the Hub only headers are fetched.",
    "selftest": "Run the repository's tests of a backend and a short bench, and write the results to one file, which "
    "names the machine. Your home folder is written as ~ there.",
}


def _text(p: Parser) -> None:
    what = p.add_argument_group("what to generate")
    what.add_argument(
        "-p", "--prompt", type=values.words, metavar="TEXT", help="the prompt; without it, stdin is the prompt"
    )
    what.add_argument("--chat", action="store_true", help="talk in turns; /help lists the commands")
    what.add_argument("--system", type=values.words, metavar="TEXT", help="system prompt")
    what.add_argument("--raw", action="store_true", help="send the prompt as it is, without the model's chat template")
    model = p.add_argument_group("model")
    flags.model(model)
    model.add_argument(
        "--fa-window",
        type=values.positive,
        metavar="N",
        help="let decoding attend to the last N tokens alone: faster in long contexts, and LOSSY (default: to all)",
    )
    model.add_argument(
        "--max-kv-size",
        type=values.positive,
        metavar="N",
        help="hold keys and values of N tokens, the first 4 and the latest: bounds memory, and LOSSY (default: all)",
    )
    flags.cache(p)
    flags.experts(p)
    flags.prefixes(p)
    flags.sampling(p)
    flags.speculation(p.add_argument_group("speculative decoding (faster, the same text)"))
    flags.window(p.add_argument_group("windows of WeDLM models (faster; without --wedlm-verify another text)"))
    r = p.add_argument_group("reply")
    flags.max_tokens(r)
    r.add_argument(
        "--think",
        action=argparse.BooleanOptionalAction,
        help="reason before the answer, or not (default: as the model's template has it); a terminal shows the "
        "reasoning dimmed, a pipe gets the answer alone",
    )
    r.add_argument(
        "--parse-special",
        action="store_true",
        help="take control tokens spelled out in messages as such (default: as text; with --raw they always count)",
    )
    r.add_argument(
        "--stop", action="append", type=values.stop, metavar="TEXT", help="end the reply before TEXT; repeatable"
    )
    r.add_argument("--stats", action="store_true", help="print speed, time to first token and peak memory to stderr")


def _rm(p: Parser) -> None:
    flags.named_model(p)
    p.add_argument("--yes", "-y", action="store_true", help="remove without asking")


def _inspect(p: Parser) -> None:
    flags.named_model(p)
    flags.cache(p, CACHE_SHORTHANDS[:-1])


def _pack(p: Parser) -> None:
    p.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    p.add_argument("out", metavar="OUT", help="name of a new file, such as model.experts")


def _plan(p: Parser) -> None:
    p.add_argument(
        "model",
        metavar="MODEL",
        help=f"{MODEL_HELP}; or the shapes of qwen3.5-122b-a10b, qwen3.5-397b-a17b, qwen3.6-35b-a3b or laguna-xs.2",
    )
    where = p.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--machines",
        metavar="FILE",
        help="a JSON file of several machines and the link between them: how to share the model (docs/machines.md)",
    )
    p.add_argument(
        "--prompt-tokens",
        type=values.positive,
        metavar="N",
        help="with --machines: tokens before the first one of a reply (default: 512)",
    )
    where.add_argument(
        "--machine",
        metavar="NAME",
        help="m1-ultra-64gb, m5-pro-64gb, m4-16gb, rtx3090-24gb, or a JSON file of a machine's rates",
    )
    p.add_argument("--expert-cache", metavar="SIZE", help="memory for experts, such as 8GB (default: several)")
    p.add_argument("--expert-profile", metavar="FILE", help="how often each expert was used (default: --skew)")
    p.add_argument(
        "--trace", metavar="FILE", help="the experts that a text's tokens chose, one after the other (default: --skew)"
    )
    p.add_argument("--skew", type=values.number, metavar="X", help="exponent of Zipf's law of their use (default: 0.9)")
    p.add_argument("--json", action="store_true", help="print one JSON object")


def _bench_options(args: argparse.Namespace) -> BenchOptions:
    """The options of the job that the flags of `bench` name; refuses flags of another job."""
    if args.spec is not None and args.synthetic is not None:
        raise UsageError("--spec and --synthetic exclude each other; random weights accept next to nothing")
    if args.serve is not None and (args.spec or args.synthetic):
        raise UsageError("--serve asks a server for its own model; leave out --spec and --synthetic")
    job: type[BenchOptions] = ModelBench if args.spec is None else SpecBench
    if args.synthetic is not None:
        job = SyntheticBench if args.draft is None else SyntheticSpecBench
        job = SyntheticWindowBench if args.wedlm else job
    job = job if args.streams is None else StreamsBench
    job = job if args.serve is None else ServeBench
    takes = {each: {f.name for f in fields(each)} for each in JOBS}
    known = set().union(*takes.values())
    given = {name: value for name, value in vars(args).items() if name in known and value is not None}
    if other := next((name for name in sorted(given) if name not in takes[job]), None):
        places = " or ".join(each.job for each in JOBS if other in takes[each])
        raise UsageError(f"--{other.replace('_', '-')} goes with {places}, not with {job.job}")
    return job(cache=CacheChoice(**{name: getattr(args, name) for name in CACHE}), **given)


def _bench(p: Parser) -> None:
    """Flags are None where they are not given; bench_options.py has the defaults of each job."""
    flags.model(p, (*BACKENDS, "all"))
    p.set_defaults(model=None)
    p.add_argument(
        "--contexts",
        type=values.counts,
        metavar="N,N",
        help="prompt tokens of each row (default: 128,512,2048; with --streams or a synthetic draft 128, --wedlm 512)",
    )
    p.add_argument(
        "--synthetic",
        metavar="SHAPE:RECIPE",
        help="in a model's place: real shapes with random weights, such as qwen3.6-27b:q4_k_m",
    )
    p.add_argument(
        "--rows",
        type=values.counts,
        metavar="N,N",
        help="with --synthetic: rows of the steps (default: 1,2,4,8,16,22,32,64)",
    )
    p.add_argument(
        "--prefill",
        type=values.counts,
        metavar="N,N",
        help="with --synthetic: tokens of a prompt (default: 512,8192)",
    )
    p.add_argument(
        "--wedlm", action="store_true", default=None, help="with --synthetic: steps of a WeDLM window and their choice"
    )
    p.add_argument(
        "--streams",
        type=values.counts,
        metavar="N,N",
        help="so many replies at once, such as 1,4,16: their speed, the first token, the time between tokens",
    )
    p.add_argument("--new-tokens", type=values.positive, metavar="N", help="decoded tokens of each run (default: 64)")
    p.add_argument("--runs", type=values.positive, metavar="N", help="runs of each row; medians count (default: 5)")
    p.add_argument("--memory", metavar="SIZE", help="on CUDA, most of each GPU's memory, such as 24GB (default: all)")
    flags.cache(p)
    e = p.add_argument_group("experts of a synthetic mixture")
    e.add_argument("--spark", action="store_true", default=None, help="hot experts in VRAM, cold ones in host memory")
    e.add_argument("--expert-vram", metavar="SIZE", help="VRAM for experts: 10GB, or a share of them such as 60%%")
    e.add_argument("--routing", metavar="FILE", help="the trace that steps route by (examples/routing_trace.py)")
    _speculation_bench(p.add_argument_group("speculative decoding"))
    _serve_bench(p.add_argument_group("a server"))
    p.add_argument(
        "--peer", choices=("mlx-lm",), help="time it on the same weights in turn with ours (a safetensors folder)"
    )
    p.add_argument("--log", metavar="FILE", help="append the rows to a TSV file such as BENCHMARKS.tsv")
    p.add_argument("--verdict", choices=("keep", "drop", "info"), help="what the logged rows decided")
    p.add_argument("--note", metavar="TEXT", help="why, for the log")


def _launch(p: Parser) -> None:
    p.add_argument("client", choices=("codex", "claude", "opencode"), help="the agent, which must be installed")
    p.add_argument("--url", type=values.url, default="http://127.0.0.1:8080", help="the server (default: %(default)s)")
    p.add_argument("--dry-run", action="store_true", help="print the program, its arguments and environment instead")


def _serve_bench(group: Any) -> None:
    group.add_argument(
        "--serve", type=values.url, metavar="URL", help="load the server at URL, ours or one with the same routes"
    )
    group.add_argument("--requests", type=values.positive, metavar="N", help="requests in all (default: 64)")
    group.add_argument("--concurrency", type=values.positive, metavar="N", help="requests at a time (default: 16)")
    group.add_argument("--rate", type=values.above_zero, metavar="X", help="requests begun per second, in their place")
    group.add_argument("--prompt-tokens", type=values.positive, metavar="N", help="words of a prompt (default: 128)")
    group.add_argument("--timeout", type=values.above_zero, metavar="S", help="seconds of a reply (default: 600)")
    group.add_argument("--api-key", metavar="KEY", help="the server's key")


def _perplexity(p: Parser) -> None:
    flags.named_model(p)
    p.add_argument("--text", required=True, metavar="FILE", help="the text, UTF-8")
    p.add_argument(
        "--ctx-window", type=values.count, default=512, metavar="N", help="tokens of a window (default: 512)"
    )
    p.add_argument(
        "--max-tokens", type=values.count, metavar="N", help="read the first N tokens of the text (default: all)"
    )
    r = p.add_mutually_exclusive_group()
    r.add_argument("--reference", metavar="MODEL", help="compare with this model")
    r.add_argument("--reference-file", metavar="FILE", help="compare with what --save-reference left")
    r.add_argument(
        "--save-reference",
        metavar="FILE",
        help="keep the log-probabilities, two bytes per scored token and vocabulary entry",
    )
    flags.backend(p)
    flags.cache(p)
    p.add_argument("--json", action="store_true", help="print one JSON object")


def _fit(p: Parser) -> None:
    flags.named_model(p)
    p.add_argument("--memory", metavar="SIZE", help="24GB (10^9 bytes each) or 24GiB (default: what is free here)")
    p.add_argument(
        "-c", "--ctx", type=values.tokens, metavar="N", help="tokens (default: 4096, 32768 and what it was trained for)"
    )
    p.add_argument(
        "--parallel",
        type=values.positive,
        default=1,
        metavar="N",
        help="replies at the same time, which on one GPU share memory for a context (default: 1)",
    )
    p.add_argument("--backend", choices=BACKENDS, help="default: the fastest that this machine can run")
    flags.cache(p, CACHE_SHORTHANDS[:-1])
    p.add_argument("--json", action="store_true", help="print one JSON object")


def _quantize(p: Parser) -> None:
    p.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    p.add_argument("out", nargs="?", metavar="OUT", help="a name that ends in .gguf, or that of a new MLX folder")
    p.add_argument("--bits", type=values.count, metavar="N", help="of an MLX folder: 2, 3, 4, 5, 6 or 8 (default: 4)")
    p.add_argument(
        "--group-size", type=values.count, metavar="N", help="values with one scale: 32, 64 or 128 (default: 64)"
    )
    p.add_argument("--mode", metavar="MODE", help="of an MLX folder: affine, mxfp4 or nvfp4 (default: affine)")
    p.add_argument("--type", metavar="TYPE", help="of a .gguf file: Q8_0, Q5_1, Q5_0, Q4_1 or Q4_0 (default: Q8_0)")
    p.add_argument(
        "--recipe",
        choices=("careful", "uniform", "mixed"),  # common.recipe.RECIPES
        default="careful",
        help="8 bits for embedding and head (careful, the default), one format for all (uniform), or as careful with "
        "more bits for half of the value and down projections (mixed)",
    )
    p.add_argument(
        "--layers",
        action="append",
        metavar="PATTERN=FORMAT",
        help="override the recipe for kinds or names: 'down_proj=6', 'model.layers.0.*=keep', 'head=8:32', "
        "'attn_v=Q8_0'; repeatable, the last match counts",
    )
    p.add_argument("--requantize", action="store_true", help="decode and round again what is quantized already")
    p.add_argument("--shard-size", type=values.positive, metavar="BYTES", help="of an MLX folder (default: 5000000000)")
    s = p.add_argument_group("sensitivity: quantize one kind of matrix at a time, in memory, and write nothing")
    s.add_argument("--sensitivity", action="store_true", help="print the divergence that each kind costs")
    s.add_argument("--text", metavar="FILE", help="the text to measure it on, UTF-8")
    s.add_argument("--ctx-window", type=values.count, metavar="N", help="tokens of a window (default: 512)")
    s.add_argument(
        "--max-tokens", type=values.count, metavar="N", help="read the first N tokens of the text (default: all)"
    )
    s.add_argument("--plot", metavar="FILE", help="also draw the table as an SVG file")
    s.add_argument("--backend", choices=BACKENDS, help="default: the fastest that this machine can run")


def _calibrate(p: Parser) -> None:
    flags.named_model(p)
    p.add_argument(
        "--text", required=True, metavar="FILE", help='UTF-8, or prompts: a .jsonl file of {"prompt": text} each'
    )
    p.add_argument("--prompts", type=values.positive, default=32, metavar="N", help="at most (default: 32)")
    p.add_argument(
        "--prompt-tokens", type=values.positive, default=64, metavar="N", help="of each piece of a text (default: 64)"
    )
    p.add_argument(
        "--new-tokens", type=values.positive, default=64, metavar="N", help="most tokens of a reply (default: 64)"
    )
    p.add_argument(
        "--loss", type=values.number, default=0.02, metavar="X", help="share of tokens that may differ (default: 0.02)"
    )
    p.add_argument("--windows", type=values.counts, metavar="N,N", help="masks per step (default: 8,16)")
    p.add_argument("--taus", type=values.numbers, metavar="X,X", help="nats (default: 0.1,0.2,0.4,0.6,0.9)")
    p.add_argument("--lambdas", type=values.numbers, metavar="X,X", help="nats (default: 0.02,0.05,0.1)")
    p.add_argument("--dry-run", action="store_true", help="print the table and write nothing")
    p.add_argument("--backend", choices=BACKENDS, help="default: the fastest that this machine can run")


def _finish_quantize(args: argparse.Namespace) -> None:
    """Refuse flags of writing with flags of measuring."""
    if not args.sensitivity:
        if given := next(
            (n for n in ("text", "ctx_window", "max_tokens", "plot", "backend") if getattr(args, n)), None
        ):
            raise UsageError(f"--{given.replace('_', '-')} goes with --sensitivity")
        if args.out is None:
            raise UsageError("OUT is not named; give a name that ends in .gguf, or that of a new folder")
        return
    if args.out is not None or args.text is None:
        raise UsageError("--sensitivity needs --text FILE and no OUT; it writes no model")


def _batch(p: Parser) -> None:
    p.add_argument("requests", metavar="IN", help="requests, a JSON object per line")
    p.add_argument("answers", metavar="OUT", help="answers, a JSON object per line; those that it has are kept")
    flags.model(p)
    flags.parallel(p)
    flags.cache(p)
    flags.experts(p)
    flags.prefixes(p)
    flags.sampling(p)
    flags.speculation(p.add_argument_group("speculative decoding (faster, the same text)"))
    r = p.add_argument_group("replies to requests that leave these out")
    flags.max_tokens(r)


def _serve(p: Parser) -> None:
    flags.model(p)
    flags.draft(p, "mtp, a DFlash draft named as models are, or demo")
    flags.cache(p)
    flags.experts(p)
    flags.prefixes(p)
    s = p.add_argument_group("server")
    s.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="to listen on (default: 127.0.0.1)")
    s.add_argument("--port", type=values.port, default=8080, metavar="N", help="to listen on (default: 8080)")
    s.add_argument("--api-key", action="append", type=values.key, metavar="KEY", help="required of clients; repeatable")
    s.add_argument("--api-key-file", metavar="FILE", help="keys, one per line; BIMETAL_API_KEY holds one too")
    flags.parallel(s)
    s.add_argument("--insecure", action="store_true", help="listen beyond this machine without a key")
    s.add_argument("--allow-host", action="append", metavar="NAME", help="serve this host name too; repeatable")
    s.add_argument(
        "--cors-origin", action="append", metavar="URL", help="let pages of this origin call, * any; repeatable"
    )
    s.add_argument(
        "--max-queue",
        type=values.positive,
        default=256,
        metavar="N",
        help="requests that run or wait; more are refused (default: 256)",
    )
    s.add_argument(
        "--grace", type=values.count, default=30, metavar="SECONDS", help="for running replies at the end (default: 30)"
    )
    s.add_argument("--log-json", action="store_true", help="log JSON objects")
    flags.compression(p)


def _selftest(p: Parser) -> None:
    p.add_argument("--backend", choices=BACKENDS, help="default: the fastest that this machine can run")
    p.add_argument("-m", "--model", metavar="MODEL", help=f"to time: {MODEL_HELP} (default: the demo model)")
    p.add_argument("--out", metavar="FILE", help="default: bimetal-selftest-OS-CHIP-DATE.md in this folder")


def _speculation_bench(p: Any) -> None:
    p.add_argument("--spec", metavar="FILE", help='decode the prompts of a JSON Lines file, {"prompt": text}, each way')
    p.add_argument("--prompts", type=values.positive, metavar="N", help="the first N of them (default: 16)")
    flags.draft(p, "mtp, a draft named as models are, or demo; or synthetic with --synthetic")
    p.add_argument("--tree-budget", type=values.budget, metavar="N", help="draft tokens per step (default: auto)")
    p.add_argument(
        "--tree-topk", type=values.positive, metavar="N", help="tokens considered at each place (default: 8)"
    )
    p.add_argument("--budgets", type=values.budgets, metavar="N,N", help="also trees of exactly N draft tokens")
