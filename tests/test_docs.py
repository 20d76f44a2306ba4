"What the guide tells a reader to type: commands, options, keys of the configuration, parameters of notebooks, and links between pages, all against the real thing."
import json, re, shlex
from functools import cache

import pytest, typer

from hsmoe.cli import app
from hsmoe.comm.placement import make_topology
from hsmoe.config import ConfigError, load_config
from hsmoe.notebook import parse_parameters

from conftest import ROOT

NBS = ROOT / "nbs"
GUIDE = sorted((NBS / "guide").glob("*.ipynb"))
PAGES = GUIDE + [NBS / "index.ipynb"] + sorted((NBS / "runs").glob("*.ipynb"))
ALL = sorted(NBS.rglob("*.ipynb"))
FENCE = re.compile(r"^```[ ]*(\w*)[^\n]*\n(.*?)^```", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HSMOE = {"hsmoe", "hsmoe.cli"}
SCRIPTS = {"launch.sbatch", "prepare.sbatch", "two_nodes.sh"}       # whose arguments are those of hsmoe, prepare.sbatch's those of hsmoe prepare
name = lambda page: str(page.relative_to(NBS))


@cache
def markdown(page):
    return "\n\n".join("".join(cell["source"]) for cell in json.loads(page.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "markdown")


def lines_of(page):
    "Lines of the page's fenced shell blocks, continued ones joined, comments and the shell's own words gone; and `hsmoe …` in backticks."
    text = markdown(page)
    blocks = [body.replace("\\\n", " ") for language, body in FENCE.findall(text) if language in ("bash", "sh", "")]
    inline = [line + " <…>" * line.split()[-1].startswith("-") for line in re.findall(r"`(hsmoe [^`\n]+)`", FENCE.sub("", text))]      # `hsmoe train --resume` in a sentence
    return [line for block in blocks for line in block.splitlines()] + inline


def command_of(line):
    "The words behind `hsmoe`, or behind one of the scripts that pass theirs on to it; None where the line calls neither."
    try: words = shlex.split(line, comments=True)
    except ValueError as error: pytest.fail(f"{line!r} is no shell line: {error}")
    for i, word in enumerate(words):
        script = word.rpartition("/")[2]
        if word in HSMOE and (i == 0 or words[i - 1] == "-m" or words[0] == "srun" or "=" in words[i - 1]): return words[i + 1:]
        if script in SCRIPTS and words[0] not in ("cat", "cp"): return (["prepare"] if script == "prepare.sbatch" else []) + words[i + 1:]
    return None


@cache
def commands():
    found = {(name(page), line): words for page in PAGES for line in lines_of(page) if (words := command_of(line))}
    return [(page, line, words) for (page, line), words in found.items()]


def split(command, words):
    "(options with their values, what is left) of a command's words; fails at an option that the command does not have."
    known = {o: p for p in command.params if p.param_type_name == "option" for o in (*p.opts, *p.secondary_opts)} | {"--help": None}
    free, given, rest, i = command.context_settings.get("ignore_unknown_options"), {}, [], 0
    while i < len(words):
        word, equals, value = words[i].partition("=") if words[i].startswith("--") else (words[i], "", "")
        if not word.startswith("-"): rest.append(words[i])
        elif word in known:
            option = known[word]
            takes = option is not None and not option.is_flag and not equals
            assert not takes or i + 1 < len(words), f"{word} has no value"
            given[word] = words[i + 1] if takes else value
            i += takes
        else:
            assert free, f"hsmoe {command.name} has no option {word}"
            rest.append(words[i])
        i += 1
    return given, rest


def placeholder(word):
    return "<" in word or "…" in word or "NAME" in word


def notebook_of(command, rest):
    if command == "bench": return NBS / "bench" / f"{rest[0]}.ipynb"
    return ROOT / rest[0]


def processes(line):
    "How many processes the line starts; None where it does not say."
    if found := re.search(r"--nproc-per-node[ =](\d+)", line): return int(found[1])
    if "launch.sbatch" in line:
        nodes, gpus = (re.search(rf"--{what}[ =](\d+)", line) for what in ("nodes", "gpus-per-node"))
        return (int(nodes[1]) if nodes else 1) * (int(gpus[1]) if gpus else 4)
    if "two_nodes.sh" in line: return 2 * int(re.search(r"GPUS=(\d+)", line)[1])
    return 1


@cache
def program():
    return typer.main.get_command(app)


def check(words, line):
    group = program()
    assert words[0] in group.commands or words[0].isupper() or words[0].startswith("-"), f"hsmoe has no command {words[0]!r}"
    if words[0] not in group.commands: return
    given, rest = split(group.commands[words[0]], words[1:])
    asked = words[0]
    if asked in ("run", "bench") and rest and not rest[0].isupper():
        notebook = notebook_of(asked, rest)
        assert notebook.is_file(), f"there is no {notebook.relative_to(ROOT)}"
        parse_parameters([w for w in rest[1:] if not placeholder(w) or not w.startswith("-")], notebook)
    if asked in ("train", "prepare", "plan", "preflight"):
        overrides = [w for w in rest if not placeholder(w.partition("=")[0])]
        assert all("=" in w for w in overrides), f"{[w for w in overrides if '=' not in w]} are no overrides"
        preset = given.get("--preset", "5b" if asked == "plan" else "tiny")
        if placeholder(preset): return
        cfg = load_config(preset, [w for w in overrides if not placeholder(w)])
        if cfg.parallel.topology: make_topology(cfg.parallel.topology, cfg.parallel.ep)
        if asked == "train" and "--resume" not in given: assert cfg.parallel.dp == processes(line), f"parallel.dp is {cfg.parallel.dp}, and {processes(line)} processes are started"
        if asked == "preflight": assert processes(line) == 1, "hsmoe preflight starts its processes by itself"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_are_those_of_the_program(page):
    found = 0
    for where, line, words in commands():
        if where != name(page): continue
        found += 1
        try: check(words, line)
        except (AssertionError, ConfigError) as error: pytest.fail(f"{where}: {line!r}: {error}")
    if page.stem in ("data", "resume", "one_gpu", "export", "evaluate", "index", "train"): assert found, f"{name(page)} has no command, or none was found"


def test_links_lead_to_pages():
    broken = []
    for page in ALL:
        for target in LINK.findall(FENCE.sub("", markdown(page))):
            path = target.partition("#")[0]
            if not path or re.match(r"[a-z]+:", path): continue
            if not (page.parent / path).exists(): broken.append(f"{name(page)}: {target}")
    assert not broken, broken


def anchors(page):
    "Anchors of a page's headings, as Quarto and smalldocs make them."
    heads = re.findall(r"^#{1,6} +(.+)$", FENCE.sub("", markdown(page)), re.M)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s.-]", "", head.lower()).strip()) for head in heads}


def test_anchors_of_the_guide():
    for page in GUIDE:
        for target in LINK.findall(FENCE.sub("", markdown(page))):
            path, _, anchor = target.partition("#")
            if not anchor or re.match(r"[a-z]+:", path): continue
            assert anchor in anchors((page.parent / path) if path else page), f"{name(page)}: {target}"


def test_the_path_names_every_notebook():
    missing = [p.name for p in sorted(NBS.glob("[0-9]*.ipynb")) if f"(../{p.name})" not in markdown(NBS / "guide" / "path.ipynb")]
    assert not missing, f"nbs/guide/path.ipynb does not say what {', '.join(missing)} answer"


def test_a_glossary_is_in_order():
    terms = re.findall(r"^### (.+)$", markdown(NBS / "guide" / "glossary.ipynb"), re.M)
    assert len(terms) > 60 and terms == sorted(terms, key=str.lower) and len(set(terms)) == len(terms)


def test_mistakes_are_found():
    for line in ("hsmoe train optim.peek_lr=1e-3", "hsmoe train --sauce x", "hsmoe trian", "hsmoe eval RUN --tokens", "hsmoe run nbs/runs/train.ipynb -p minuets 3", "hsmoe run nbs/runs/no.ipynb",
                 "torchrun --nproc-per-node 2 -m hsmoe.cli train parallel.ep=x", "torchrun --nproc-per-node 2 -m hsmoe.cli train", "hsmoe train --preset 5b", "sbatch scripts/prepare.sbatch --preset 5c"):
        with pytest.raises((AssertionError, ConfigError)): check(command_of(line), line)
