"""The commands and their options. `habits` has the options of other engines."""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from toka_async import __version__
from toka_async.bench.commands import add_benchmarks
from toka_async.cli.listing import key_lines
from toka_async.cli.overrides import translate_options
from toka_async.config.load import describe

WIDTH = 80  # columns of the list of keys
KEYS = "every key of the configuration: toka-async config --help"
OVERRIDE = "section.key=value"
EXAMPLES = """\
examples:
  toka-async serve                              the built-in model, port 10210
  toka-async serve Qwen/Qwen2.5-0.5B-Instruct   a model of the hub
  toka-async serve /models/llama --port 8000 parallel.tp=2
  toka-async ping "Question: ..." -n 64         64 samples and their vote
  toka-async chat                               a conversation in the terminal

"""
OFTEN_USED = """\
often used, and accepted as other engines write them:
  --port N, --host ADDRESS         server.port, server.host
  --served-model-name NAME         model.served_name
  --max-model-len N                model.max_context
  --dtype TYPE                     model.dtype
  --tensor-parallel-size N, -tp    parallel.tp, and likewise -pp and -dp
  --gpu-memory-utilization SHARE   cache.memory_fraction
  --max-num-seqs N                 schedule.max_seqs
  --max-num-batched-tokens N       schedule.max_tokens
"""
NODE_ENVIRONMENT = """\
Defaults come from LWS_LEADER_ADDRESS, LWS_WORKER_INDEX, LWS_GROUP_SIZE, or from
Slurm's variables of a step or a job. All machines need the same secret in
TOKA_CLUSTER_KEY. A machine without a configuration takes the leader's.
"""
RESOLVED = """\
The output can be served with --config. `auto` is resolved as far as possible
without a start.

keys:
"""
MODEL_HELP = "model directory or hub id (model.path), and overrides of configuration keys, also as --section.key value"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Like `parse_args`, with overrides also after options, where argparse leaves them over.

    Raises ConfigError for another engine's option that has no equal here. Mistakes end the process.
    """
    parser = _make_parser()
    options: argparse.Namespace
    options, rest = parser.parse_known_args(arguments)
    if options.command is None:
        parser.print_help(sys.stderr)
        parser.exit(2)
    if rest and (not hasattr(options, "overrides") or any(text.startswith("-") for text in rest)):
        wrong = next((text for text in rest if text.startswith("-")), rest[0])
        parser.error(f"unknown argument {wrong!r}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Help that fits a terminal of 80 columns, with room for the longest option's name."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=WIDTH)


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one line. With a configuration, it takes other engines' options as overrides."""

    takes_configuration = False

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=_Formatter, allow_abbrev=False, **settings)
        self.own: set[str] = {"-h", "--help"}

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:
        if hasattr(self, "own"):  # not set yet in the base's constructor
            self.own.update(names)
        return super().add_argument(*names, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.takes_configuration:
            args = translate_options(args, self.own)
        return super().parse_known_args(args, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Suggest the most similar choice, of a command or an option."""
        known = list(action.choices or [value])
        if value not in known:
            near = get_close_matches(value, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"expected {' or '.join(known)}"
            name = "/".join(action.option_strings) or action.dest
            self.error(f"unknown {name} {value!r}; {hint}")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"toka-async: {message} (see {self.prog} --help)\n")


def _make_parser() -> _Parser:
    parser = _Parser(
        prog="toka-async", description="An LLM inference engine for high-throughput work.", epilog=EXAMPLES + KEYS
    )
    parser.add_argument("--version", action="version", version=f"toka-async {__version__}")
    command = _add_commands(parser, "command", required=False)
    serve = command("serve", "serve a model over HTTP until SIGTERM or SIGINT")
    _add_lifeline(serve)
    _add_configuration(serve)
    serve.epilog = f"{OFTEN_USED}\n{KEYS}"
    _add_node(command("node", "be one of several machines that serve a model; the first one (--index 0) is the leader"))
    _add_configuration(command("warm", "compile and measure ahead what a start would, and end: for images"))
    _add_ping(command("ping", "ask a running server; with -n: many samples and their vote"))
    _add_chat(command("chat", "talk with a running server in the terminal"))
    _add_batch(_add_commands(command("batch", "answer files of requests, without a server"), "action"))
    plan = command("plan", "show what would go on which GPU, without starting anything")
    plan.add_argument(
        "--gpu-memory", type=_parse_positive, metavar="GIB", help="of each GPU; default: as this machine's"
    )
    _add_configuration(plan)
    models = command("models", "list the models that run, and by whose code; or say what would become of one, and why")
    models.add_argument("--json", action="store_true", help="for programs")
    _add_configuration(models)
    _add_config(command("config", "print the configuration in effect, as TOML"))
    pair = command("keys", "make a pair of keys for direct submission: NAME.key is public, NAME.key_secret is not")
    pair.add_argument("name", type=_parse_name)
    pair.add_argument("--folder", type=Path, default=Path(), help="where to write them; default: here")
    add_benchmarks(_add_commands(command("bench", "run a benchmark"), "benchmark"))
    command("version", "print the version")
    return parser


def _add_node(parser: _Parser) -> None:
    parser.add_argument(
        "--leader", default="", metavar="ADDRESS", help="tcp://HOST:PORT of the leader; default: from the environment"
    )
    parser.add_argument("--index", type=int, metavar="K", help="this machine's number; 0: the leader")
    parser.add_argument("--size", type=int, metavar="M", help="number of machines")
    parser.add_argument(
        "--interface", default="", metavar="NAME", help="network interface to the others; default: the route's"
    )
    _add_lifeline(parser)
    _add_configuration(parser)
    parser.epilog = f"{NODE_ENVIRONMENT}\n{KEYS}"


def _add_lifeline(parser: _Parser) -> None:
    """Two options, since one with an optional value would take the model for it."""
    parser.add_argument(
        "--lifeline",
        action="store_const",
        const=0,
        help="end at once, with all processes, at the end of standard input: when whoever started it ends",
    )
    parser.add_argument(
        "--lifeline-fd",
        dest="lifeline",
        type=_parse_descriptor,
        metavar="FD",
        help="the same at the end of this open descriptor",
    )


def _add_ping(parser: _Parser) -> None:
    parser.add_argument("prompt", help="a text to complete, or a chat message; -: standard input")
    parser.add_argument(
        "-n", type=_parse_count, default=1, metavar="N", help="samples; with many, some are shown and all vote"
    )
    _add_sampling(parser)
    parser.add_argument("--seed", type=int, metavar="N", help="random seed of the samples")
    parser.add_argument("--chat", action="store_true", help="send a user's chat message, not text to complete")
    _add_server(parser)


def _add_chat(parser: _Parser) -> None:
    _add_sampling(parser)
    _add_server(parser)


def _add_sampling(parser: _Parser) -> None:
    parser.add_argument("--temperature", type=float, metavar="T", help="default: the model's")
    parser.add_argument("--top-p", type=float, metavar="P", help="default: the model's")
    parser.add_argument(
        "--max-tokens", type=_parse_count, metavar="N", help="at most, of an answer; default: 256, in a chat what fits"
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="system message of the chat")
    parser.add_argument("--model", default="", metavar="NAME", help="model name; default: the one that is served")


def _add_server(parser: _Parser) -> None:
    parser.add_argument("--url", help="the server's, such as http://127.0.0.1:10210; default: from the configuration")
    _add_configuration(parser, has_model=False)
    parser.epilog = f"An API key is taken from TOKA_API_KEY in the environment.\n{parser.epilog}"


def _add_config(parser: _Parser) -> None:
    parser.add_argument("--markdown", action="store_true", help="every key with its meaning, as a Markdown table")
    parser.add_argument("--unresolved", action="store_true", help="leave `auto` as it is, and read no model")
    _add_configuration(parser)
    parser.epilog = RESOLVED + "\n".join(key_lines(describe(), WIDTH))


def _add_batch(add: Callable[[str, str], _Parser]) -> None:
    run = add(
        "run",
        "answer every line of a file in the format of OpenAI's batches, or every row of a data set; continues after a "
        "stop",
    )
    run.add_argument(
        "-i",
        "--input",
        type=Path,
        required=True,
        metavar="IN",
        help="lines of OpenAI's batches (JSONL); or rows: a Parquet or JSONL file, a data set's folder",
    )
    run.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help=".jsonl; for rows also .parquet")
    run.add_argument("-e", "--errors", type=Path, metavar="ERR.jsonl", help="failed lines; default: OUT.errors.jsonl")
    run.add_argument("--retry-failed", action="store_true", help="retry lines or rows that failed in an earlier run")
    _add_rows(run)
    run.usage = f"%(prog)s -i IN -o OUT [options] [MODEL | {OVERRIDE}]"
    _add_configuration(run)


def _add_rows(parser: _Parser) -> None:
    """Options of rows only, without defaults: `batch_rows` refuses them for lines of OpenAI's batches."""
    add = parser.add_argument
    add("--column", metavar="NAME", help="of the rows' text, token ids or messages; default: messages or prompt")
    add("--split", metavar="NAME", help="of a folder with several")
    add("--keep", metavar="NAME,...", help="columns that the output repeats; default: all")
    add("--chat", action="store_true", default=None, help="a row's text is a chat message, not to be continued")
    add("--system", metavar="TEXT", help="system message of the rows' chats")
    add("-n", type=_parse_count, metavar="N", help="samples of a row; if more than one, answers are lists")
    add("--temperature", type=float, metavar="T", help="of rows; default: the model's")
    add("--top-p", type=float, metavar="P", help="of rows; default: the model's")
    add("--max-tokens", type=_parse_count, metavar="N", help="of rows; default: 256, in chats what fits")
    add("--stop", action="append", metavar="TEXT", help="where answers to rows end; can be repeated")
    add("--seed", type=int, metavar="N", help="of the first row; each next row's is one more")
    add("--extra-body", metavar="JSON", help='further fields of rows\' requests, such as {"top_k": 20}')
    add("--answer-column", metavar="NAME", help="of the output; default: generated_text")
    add("--response-column", metavar="NAME", help="of the output, for whole responses as JSON; default: none")


def _add_configuration(parser: _Parser, *, has_model: bool = True) -> None:
    parser.takes_configuration = True
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help="configuration file")
    metavar = f"MODEL | {OVERRIDE}" if has_model else OVERRIDE
    meaning = MODEL_HELP if has_model else "configuration, such as server.port=8000"
    # Without a default argparse would list it among the missing arguments.
    parser.add_argument("overrides", nargs="*", default=[], metavar=metavar, help=meaning)
    parser.set_defaults(has_model=has_model)
    parser.epilog = KEYS


def _add_commands(parser: _Parser, what: str, *, required: bool = True) -> Callable[[str, str], _Parser]:
    """Give the parser subcommands; returns what adds one, by its name and meaning."""
    commands = parser.add_subparsers(dest=what, required=required, metavar=what, parser_class=_Parser)

    def add(name: str, meaning: str) -> _Parser:
        return commands.add_parser(name, help=meaning, description=textwrap.fill(meaning, WIDTH))

    return add


def _parse_name(text: str) -> str:
    if not text or Path(text).name != text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a file name")
    return text


def _parse_descriptor(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a descriptor's number")
    return int(text)


def _parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _parse_positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number
