"""Flags of the commands that answer many requests, and of those that ask a server."""

from collections.abc import Mapping
from typing import Any

from generate import flags, values
from generate.flags import Parser


def serve(p: Parser) -> None:
    p.add_argument("named", nargs="?", metavar="MODEL", help="the model to serve, in place of --model")
    flags.model(p)
    flags.cache(p)
    flags.adapters(p)
    flags.experts(p)
    flags.prefixes(p)
    flags.sampling(p)
    flags.speculation(p.add_argument_group("speculative decoding (faster, the same text)"))
    flags.window(p.add_argument_group("windows of WeDLM models (faster; without --wedlm-verify another text)"))
    flags.max_tokens(p.add_argument_group("replies to requests that leave these out"))
    s = p.add_argument_group("server")
    s.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1)")
    s.add_argument("--port", type=values.port, default=8080, metavar="N", help="port to listen on (default: 8080)")
    s.add_argument(
        "--api-key", action="append", type=values.key, metavar="KEY", help="key that clients must send; repeatable"
    )
    s.add_argument("--api-key-file", metavar="FILE", help="keys, one per line; BIMETAL_API_KEY holds one too")
    flags.parallel(s)
    s.add_argument("--insecure", action="store_true", help="listen beyond this machine without a key")
    s.add_argument(
        "--allow-host", action="append", type=values.host, metavar="NAME", help="serve this host name too; repeatable"
    )
    s.add_argument(
        "--cors-origin",
        action="append",
        type=values.origin,
        metavar="URL",
        help="origin whose pages may call; * is any; repeatable",
    )
    s.add_argument(
        "--max-queue",
        type=values.positive,
        default=256,
        metavar="N",
        help="requests that run or wait; more are refused (default: 256)",
    )
    s.add_argument(
        "--grace", type=values.count, default=30, metavar="SECONDS", help="time to finish replies at exit (default: 30)"
    )
    s.add_argument(
        "--warmup",
        action=flags.Switch,
        default=True,
        help="on CUDA, compile kernels and capture graphs before the first request (default: on)",
    )
    s.add_argument(
        "--rerank",
        "--reranker",
        "--reranking",
        dest="reranker",
        action="store_true",
        default=None,
        help="rerank with a Qwen3-Reranker whose files do not state that it is one (docs/server.md)",
    )
    s.add_argument("--log-json", action="store_true", help="log JSON objects")
    flags.compression(p)


def flags_of(given: Mapping[str, Any]) -> list[str]:
    """Return the flags of `serve` for values by name, with _ for -, as a configuration file has them.

    True, or "true", gives a flag without a value, False its --no-NAME if there is one, a list the flag several times.
    """
    parser, found = Parser(), list[str]()
    serve(parser)
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True or value == "true":
            found.append(flag)
        elif value is False or value == "false":
            found += {f"--no-{flag[2:]}"} & parser._option_string_actions.keys()
        elif isinstance(value, list | tuple):
            found += [f"{flag}={each}" for each in value]
        else:
            found.append(f"{flag}={value}")
    return found


def batch(p: Parser) -> None:
    p.add_argument("requests", type=values.file, metavar="IN", help="requests, a JSON object per line")
    p.add_argument(
        "answers", type=values.file, metavar="OUT", help="answers, a JSON object per line; existing answers are kept"
    )
    flags.model(p)
    flags.parallel(p)
    flags.cache(p)
    flags.adapters(p)
    flags.experts(p)
    flags.prefixes(p)
    flags.sampling(p)
    flags.speculation(p.add_argument_group("speculative decoding (faster, the same text)"))
    flags.window(p.add_argument_group("windows of WeDLM models (faster; without --wedlm-verify another text)"))
    r = p.add_argument_group("replies to requests that leave these out")
    flags.max_tokens(r)


def launch(p: Parser) -> None:
    p.add_argument("client", choices=("codex", "claude", "opencode"), help="the agent, which must be installed")
    p.add_argument("--url", type=values.url, default="http://127.0.0.1:8080", help="the server (default: %(default)s)")
    p.add_argument("--dry-run", action="store_true", help="print the program, its arguments and environment instead")
