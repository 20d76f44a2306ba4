"""Time to first token, time per further token, tokens a second and dollars a million, by batch size and prompt length (SPEC R-03, R-05).

`python scripts/profile_serving.py TARGET` takes the address of any OpenAI-compatible server (`http://host:8000`), or a run or exported model, which it serves itself with vLLM for as long as the
measurement lasts (`--vllm-python` or HSMOE_VLLM_PYTHON says where vLLM is; what follows `--` goes to `vllm serve`). It writes `OUT.json` and, drawn, `OUT.png`.

Each cell is `--rounds` rounds of a batch of users who ask at the same moment, with prompts drawn anew, behind one round of warming up. `--shared 0.5` measures every cell again with half of each
prompt in common, which shows what prefix caching gains. Tokens are counted by the server. The price is that of the machine in an hour; the cost of a token at a batch size is meaningful only where
that many users are there.
"""
import argparse, contextlib, datetime, http.client, json, sys
from pathlib import Path
from urllib.parse import urlsplit

import torch

from hsmoe.bench import card_name
from hsmoe.config import ConfigError
from hsmoe.export import read_export
from hsmoe.notebook import USER_ERRORS
from hsmoe.serve import Server, draw_profile, find_vllm, profile, profile_record, serve_command, served_folder
from hsmoe.train.checkpoint import write_whole


def numbers(text):
    "`1,2,4` as a list of positive numbers"
    try: found = [int(part) for part in text.split(",")]
    except ValueError: found = [0]
    if min(found) < 1: raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers from 1 up, with commas")
    return found


def asked(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="What follows -- goes to vllm serve.")
    parser.add_argument("target", help="http://HOST:PORT of a server, or a run or exported model")
    parser.add_argument("--out", type=Path, default=Path("serving"), help="OUT.json and OUT.png are written")
    parser.add_argument("--model", default="hsmoe", help="the model's name at the server")
    parser.add_argument("--batches", type=numbers, default=[1, 2, 4, 8, 16])
    parser.add_argument("--prompt-lengths", type=numbers, default=[128, 1024])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shared", type=float, default=0.0, help="part of a prompt that all have in common, 0 to 1")
    parser.add_argument("--price", type=float, default=0.49, help="dollars an hour of the machine")
    parser.add_argument("--vocab-size", type=int, help="send ids below this in place of text; default the model's where a folder is given")
    parser.add_argument("--no-ignore-eos", action="store_true", help="for servers that do not know ignore_eos")
    parser.add_argument("--card", help="name of the accelerator in the record; default this machine's")
    parser.add_argument("--vllm-python", help="interpreter that has vLLM")
    arguments = sys.argv[1:] if arguments is None else arguments
    at = arguments.index("--") if "--" in arguments else len(arguments)
    args = parser.parse_args(arguments[:at])
    if not 0 <= args.shared < 1: parser.error(f"--shared = {args.shared} must be from 0 up to, not including, 1")
    for name in ("new_tokens", "rounds", "price"):
        if getattr(args, name) <= 0: parser.error(f"--{name.replace('_', '-')} = {getattr(args, name)} must be above 0")
    return args, arguments[at + 1:]


def server_name(url):
    "What the server says it is: vLLM answers /version; others are named by their address"
    at = urlsplit(url)
    kind = http.client.HTTPSConnection if at.scheme == "https" else http.client.HTTPConnection
    try:
        with contextlib.closing(kind(at.hostname, at.port, timeout=10)) as connection:
            connection.request("GET", "/version")
            return f"vLLM {json.loads(connection.getresponse().read())['version']}"
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException): return at.netloc


@contextlib.contextmanager
def endpoint(args, extra):
    "(url, what is served, ids of its vocabulary or None): of a server that is there, or of one that lives as long as the block"
    if args.target.startswith(("http://", "https://")):
        if extra: raise ConfigError(f"{args.target} is a server already, so {' '.join(extra)} cannot reach it; start it with these options")
        yield args.target, args.model, args.vocab_size
        return
    python, folder = find_vllm(args.vllm_python), served_folder(args.target, say=print)
    about = read_export(folder)
    longest = max(args.prompt_lengths) + args.new_tokens
    if longest > about["max_position_embeddings"]:
        raise ConfigError(f"prompts of {max(args.prompt_lengths)} and {args.new_tokens} new tokens need a context of {longest}, and {folder} has {about['max_position_embeddings']}; choose shorter ones")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with Server(lambda port: serve_command(python, folder, port=port, extra=extra), args.out.with_suffix(".log")) as server:
        yield server.url, about["native_config"]["name"], args.vocab_size or about["vocab_size"]


def main(arguments=None):
    args, extra = asked(arguments)
    more = {} if args.no_ignore_eos else dict(ignore_eos=True)
    with endpoint(args, extra) as (url, name, vocab_size):
        about = dict(model=name, card=args.card or card_name("cuda" if torch.cuda.is_available() else None), server=server_name(url), date=datetime.date.today().isoformat(), options=extra)
        cells = profile(url, args.model, args.batches, args.prompt_lengths, args.new_tokens, args.rounds, vocab_size, args.shared, lambda line: print(line, flush=True), **more)
    record = profile_record(cells, about, args.price)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(args.out.with_suffix(".json"), json.dumps(record, indent=1) + "\n")
    import matplotlib
    matplotlib.use("Agg")
    draw_profile(record).savefig(args.out.with_suffix(".png"), dpi=100)
    best = min(record["cells"], key=lambda c: c["dollars_per_million_total"])
    print(f"cheapest at batch {best['batch']}, prompt {best['prompt_tokens']}: ${best['dollars_per_million_total']:.4f} a million tokens read and written, "
          f"${best['dollars_per_million_output']:.4f} a million written, at ${args.price:g} an hour")
    print(args.out.with_suffix(".json"))


if __name__ == "__main__":
    try: main()
    except USER_ERRORS as e:
        print(f"profile_serving.py: {e}", file=sys.stderr)
        sys.exit(2)
