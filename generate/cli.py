"""The command line: commands, parsing, and checks of flags. Imports nothing heavy, so that `--help` is fast."""

import argparse
import os
import shlex
import sys
from itertools import takewhile
from typing import Any

from common.decoders import check_draft, check_taken
from common.errors import UsageError
from common.options import GenerationOptions, LoadOptions
from generate import __version__, bench_flags, flags, model_flags, server_flags, values
from generate.flags import LOAD, OPTIONS, SPECULATION, WINDOW, Parser

COMMANDS = {
    "list": "list the downloaded models: name, files, size, last use",
    "pull": "download a model",
    "rm": "remove a downloaded model",
    "devices": "show the backends of this machine, which one is chosen and why",
    "inspect": "show a model's architecture, shapes, block types, tokenizer, and memory by context length",
    "bench": "measure prefill and decode speed at several context lengths",
    "perplexity": "measure how well a model predicts a text, and its divergence from a reference",
    "fit": "show which of a model's files fit into memory, and with how long a context",
    "quantize": "write a model in fewer bits, as an MLX folder or a GGUF file, or measure the loss",
    "calibrate": "choose the window of a WeDLM model by measuring several on a text",
    "pack": "write a mixture's experts into one file, each contiguous, for --stream-experts",
    "plan": "predict tokens per second: of a mixture with streamed experts, or of several machines",
    "batch": "answer the requests of a JSON Lines file, several at a time",
    "serve": "run an HTTP server with the APIs of OpenAI, Anthropic and Ollama",
    "launch": "start a coding agent (codex, claude, opencode) on a running server",
    "selftest": "run the conformance tests and a short bench, and write a report to send us",
}

FOREIGN_COMMANDS = {  # what commands of Ollama, mlx-lm, vLLM and the Hub's client are here
    **dict.fromkeys(("chat", "run"), "--model MODEL --chat"),
    **dict.fromkeys(("generate", "complete"), "--model MODEL --prompt TEXT"),
    "server": "serve MODEL",
    "download": "pull MODEL",
    "show": "inspect MODEL",
    "convert": "quantize MODEL OUT",
    "run-batch": "batch IN OUT",
    "ls": "list",
}


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the parsed arguments.

    command  a key of COMMANDS, or "prompt" or "chat"
    options  of prompt, chat, serve and batch: checked keyword arguments of LLM.stream; of bench: a BenchOptions
    load     of prompt, chat, serve and batch: a LoadOptions
    window   of serve and batch: the given options of WeDLM, as GenerationOptions, or None
    rest     of launch: the arguments of the program that is launched
    given    the flags that were given with a value, or as --NAME or --no-NAME
    """
    _check_words(argv)
    end = argv.index("--") if argv[:1] == ["launch"] and "--" in argv else len(argv)  # of our own flags
    parser = _parser()
    if not argv or argv[0] not in COMMANDS:
        parser.refuse_unknown(takewhile(lambda word: word not in COMMANDS, argv[:end]))
    args = parser.parse_args(argv[:end])
    args.given = vars(args).pop("_given", set())
    if args.command is None:
        _finish_text(args)
    elif argv[0] != args.command:
        raise UsageError(f"the command {args.command} comes first, and its flags after it")
    else:
        _finish(args, argv[end + 1 :])
    return args


def _check_words(argv: list[str]) -> None:
    """Refuse words that argparse would misread: an unknown command, and a value "--"."""
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        hint = f"commands: {', '.join(COMMANDS)}; a prompt goes after --prompt"
        if form := FOREIGN_COMMANDS.get(argv[0]):
            named = form.replace("MODEL", shlex.quote(argv[1])) if argv[1:] and not argv[1].startswith("-") else form
            hint = f"here it is: {_prog()} {named}"
        raise UsageError(f"{argv[0]!r} is not a command; {hint}")
    if empty := next((flag for flag in argv if flag.startswith("--") and flag.endswith("=--")), None):
        raise UsageError(f"{empty[:-3]} has the value '--', which ends the flags; give another")


FORMS = "json-schema", "grammar", "grammar-file"  # flags of the form of a reply


def _finish_text(args: argparse.Namespace) -> None:
    """Name the command, prompt or chat, refuse flags that exclude each other, and collect options."""
    args.command = "chat" if args.chat else "prompt"
    given = [f"--{name}" for name in ("prompt", "file") if getattr(args, name) is not None]
    if args.chat and given:
        raise UsageError(f"--chat and {given[0]} exclude each other; in a chat the prompt is typed")
    forms = [f"--{name}" for name in FORMS if getattr(args, name.replace("-", "_")) is not None]
    if args.chat and forms:
        raise UsageError(f"--chat and {forms[0]} exclude each other; a schema or a grammar is for one reply")
    if len(forms) > 1:
        raise UsageError(f"{' and '.join(forms)} exclude each other; either gives the form of the reply")
    if len(given) > 1:
        raise UsageError("--prompt and --file exclude each other; either gives the prompt")
    for flag, is_given, why in (
        ("--chat", args.chat, "a chat needs the model's template"),
        ("--think", args.think is not None, "only the model's template turns thinking on and off"),
        ("--reasoning-effort", args.reasoning_effort is not None, "only the model's template tells it the effort"),
        ("--parse-special", args.parse_special, "control tokens in a raw prompt are always read as such"),
        ("--system", args.system is not None, "a system prompt needs the model's template"),
    ):
        if is_given and (args.raw or args.suffix is not None):
            other = "--raw" if args.suffix is None else "--suffix, which uses no template,"
            raise UsageError(f"{flag} and {other} exclude each other; {why}")
    if not args.chat and not given and sys.stdin.isatty():
        raise UsageError("no prompt: give --prompt TEXT, --file FILE, a prompt on stdin, or --chat")
    args.options = _given_options(args)
    args.load = _load_options(args)


def _given_options(args: argparse.Namespace) -> dict[str, Any]:
    """Collect the given options of generation; refuses values that no model supports before one is loaded."""
    given = {name: getattr(args, name) for name in OPTIONS if getattr(args, name, None) is not None}
    GenerationOptions(**given)
    kind, has_draft = given.get("spec"), getattr(args, "draft", None) is not None
    if kind is not None:
        check_draft(kind, has_draft)
    if kind is not None or not has_draft:  # else the draft decides
        check_taken(kind, [name for name in (*SPECULATION[1:], *WINDOW) if name in given])
    return given


def _load_options(args: argparse.Namespace) -> LoadOptions:
    """Return the options of loading among the flags of a command that has some or all of them."""
    given: dict[str, Any] = {name: getattr(args, name) for name in LOAD if hasattr(args, name)}
    if args.command in ("prompt", "chat"):
        given["parallel"] = 1  # so that no memory is reserved for other replies
    if args.command == "serve":
        given["queue"] = args.max_queue
    return LoadOptions(progress=True, **given)


def _finish(args: argparse.Namespace, rest: list[str]) -> None:
    """Check what argparse does not: that the model is named once, and flags are those of one bench.

    rest  what follows `--`, for the program that is launched
    """
    if args.command == "quantize":
        model_flags.check_quantize(args)
    if args.command in ("inspect", "perplexity", "calibrate", "fit", "pull", "rm"):
        if (args.model is None) == (args.named is None):
            many = "is not named" if args.model is None else "is named twice"
            raise UsageError(f"the model {many}; give it as MODEL or by --model")
        args.model = args.named if args.model is None else args.model
    if args.command in ("serve", "bench") and args.named is not None:
        if "model" in args.given:
            raise UsageError("the model is named twice; give it as MODEL or by --model")
        args.model = args.named
        args.given.add("model")
    if args.command in ("serve", "batch"):
        args.load, args.options = _load_options(args), _given_options(args)
        window = {name: args.options.pop(name) for name in WINDOW if name in args.options}
        spec = args.options.get("spec")
        args.window = GenerationOptions(spec=spec, **window) if window or spec == "wedlm" else None
    if args.command == "launch":
        args.rest = rest
    if args.command == "bench":
        args.options = bench_flags.options(args)


def _prog() -> str:
    return "bimetal" if os.path.basename(sys.argv[0]) == "bimetal" else "python -m generate"


def _parser() -> Parser:
    prog = _prog()
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
        "rm": model_flags.rm,
        "devices": lambda p: None,
        "inspect": model_flags.inspect,
        "bench": bench_flags.bench,
        "perplexity": model_flags.perplexity,
        "fit": model_flags.fit,
        "quantize": model_flags.quantize,
        "calibrate": model_flags.calibrate,
        "pack": model_flags.pack,
        "plan": model_flags.plan,
        "batch": server_flags.batch,
        "serve": server_flags.serve,
        "launch": server_flags.launch,
        "selftest": model_flags.selftest,
    }
    for name, what in COMMANDS.items():
        add[name](commands.add_parser(name, help=what, description=DESCRIPTIONS.get(name, what)))
    return p


DESCRIPTIONS = {
    "devices": "Show the backends of this machine, which one is chosen and why.",
    "inspect": "Show a model's architecture, shapes, block types and tokenizer, and its memory by context length.",
    "bench": "Measure prefill and decode speed of a model at several context lengths; or, with one of these flags: "
    "--synthetic, released shapes with random weights; --streams, several replies at once; --spec-prompts, the "
    "speculative modes on prompts; --serve, a server under load.",
    "plan": "Predict tokens per second: of a mixture whose experts are read from disk (--machine), or of several "
    "machines that divide a model (--cluster).",
    "list": "List the models in the Hugging Face cache, also those that other tools have downloaded.",
    "pull": "Download a model into the Hugging Face cache, as --model does, and print its path.",
    "rm": "Remove a model from the Hugging Face cache, which other tools use too; owner/repo removes the repository.",
    "serve": "Serve a model on this machine. Logs hold neither prompts nor keys.",
    "batch": "Answer the requests of IN, and write each answer as a line of OUT when it is finished. A run that was "
    "stopped resumes when the same command is given again. A line of IN is a request of OpenAI's batch API (custom_id, "
    'method, url, body), {"prompt": text} or {"messages": [...]}; docs/batching.md describes the answers.',
    "pack": "Write a mixture's experts into one file, each contiguous, for --expert-pack. A run that was stopped "
    "resumes when the same command is given again.",
    "launch": "Start a coding agent that uses a running server, with settings for this run only. Arguments after -- "
    "are passed to the agent. A key of the server is read from BIMETAL_API_KEY.",
    "quantize": "Write a model in fewer bits: OUT that ends in .gguf is a GGUF file, any other an MLX folder, which "
    "mlx-lm reads too. A run that was stopped resumes when the same command is given again.",
    "perplexity": "Measure the perplexity of a model over a text, by llama-perplexity's convention: each window is "
    "read from an empty state, and its second half is scored. With a reference, "
    "also measure KL divergence and agreement.",
    "calibrate": "Decode replies with a grid of windows, and measure tokens per forward and the share of tokens that "
    "plain greedy decoding would have chosen. The window with the most tokens per forward within --loss is saved in a "
    "file beside the model, and is the default of its replies from then on.",
    "fit": "Predict the peak memory of a model, by file and context, while a prompt of the whole context is read. Of a "
    "repository on the Hub only headers are downloaded.",
    "selftest": "Run the repository's tests of a backend and a short bench, and write the results to one file, which "
    "names the machine; your home folder appears in it as ~.",
}


def _text(p: Parser) -> None:
    what = p.add_argument_group("what to generate")
    what.add_argument(
        "-p", "--prompt", type=values.words, metavar="TEXT", help="the prompt; - is stdin, as without -p and -f"
    )
    what.add_argument("-f", "--file", type=values.source, metavar="FILE", help="read the prompt from FILE")
    what.add_argument("-cnv", "--chat", action="store_true", help="talk in turns; /help lists the commands")
    what.add_argument(
        "-sys", "--system-prompt", "--system", dest="system", type=values.words, metavar="TEXT", help="system prompt"
    )
    what.add_argument("--raw", action="store_true", help="send the prompt as it is, without the model's chat template")
    what.add_argument(
        "--suffix",
        type=values.words,
        metavar="TEXT",
        help="fill the gap between the prompt and this text, with a model that has the tokens of fill-in-the-middle",
    )
    what.add_argument(
        "-j",
        "--json-schema",
        type=values.schema,
        metavar="SCHEMA",
        help='reply with JSON of this JSON schema, such as \'{"type": "array"}\'',
    )
    what.add_argument(
        "--grammar", type=values.words, metavar="TEXT", help="reply by this grammar: GBNF, as in llama.cpp, or Lark"
    )
    what.add_argument("--grammar-file", metavar="FILE", help="reply by the grammar in this file")
    model = p.add_argument_group("model")
    flags.model(model)
    model.add_argument(
        "--attention-window",
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
    flags.adapters(p)
    flags.experts(p)
    flags.prefixes(p)
    flags.sampling(p)
    flags.speculation(p.add_argument_group("speculative decoding (faster, the same text)"))
    flags.window(p.add_argument_group("windows of WeDLM models (faster; without --wedlm-verify another text)"))
    r = p.add_argument_group("reply")
    flags.max_tokens(r)
    r.add_argument(
        "--think",
        action=flags.Switch,
        help="reason before the answer, or not (default: as in the model's template); a terminal shows the "
        "reasoning dimmed, a pipe gets the answer alone",
    )
    r.add_argument(
        "--reasoning-effort",
        choices=("low", "medium", "high"),
        help="how much to reason, which the template of some models, such as gpt-oss, tells them (default: its own)",
    )
    r.add_argument(
        "--parse-special",
        action="store_true",
        help="read control tokens that are spelled out in messages as control tokens, not as text; --raw always does",
    )
    r.add_argument(
        "--stop", action="append", type=values.stop, metavar="TEXT", help="end the reply before TEXT; repeatable"
    )
    r.add_argument("--stats", action="store_true", help="print speed, time to first token and peak memory to stderr")
