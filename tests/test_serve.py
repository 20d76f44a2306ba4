"""Serving: what vLLM is told, the client that measures, what TensorRT-LLM is given; and, marked slow, vLLM itself.

The slow tests need an interpreter with vLLM and openai in HSMOE_VLLM_PYTHON: `HSMOE_VLLM_PYTHON=/path/to/python pytest -m slow tests/test_serve.py`."""
import ast, contextlib, http.client, importlib.util, inspect, json, os, subprocess, sys, textwrap, threading, time, types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

pytest.importorskip("transformers")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hsmoe.serve as serving
from conftest import ROOT
from hsmoe.config import ConfigError, load_config, save_config
from hsmoe.data.tokenizer import train_bpe
from hsmoe.export import export_run, import_hf
from hsmoe.model.hybrid import build_model, generate
from hsmoe.quant.fake import block_formats
from hsmoe.serve import SERVED, Server, as_served, divergences, served_folder
from hsmoe.train.checkpoint import save_state
from hsmoe.train.loop import TrainingError

SMALL = ["model.n_layers=1", "model.d_model=64", "model.n_heads=2", "model.n_routed=4", "model.expert_inner=32", "model.dense_inner=32", "model.vocab_size=300", "mtp.max_depth=3"]
TEXT = "def main():\n    return 'to be or not to be, that is the question'\n"
VLLM = os.environ.get("HSMOE_VLLM_PYTHON")


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_run(folder, step=3):
    "A run of a model that has weights larger than at the start, so that its choices are no ties"
    cfg = load_config("tiny", SMALL)
    torch.manual_seed(0)
    model = build_model(cfg)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" not in name and "moe." not in name: p.mul_(3)
    (folder / "checkpoints").mkdir(parents=True)
    save_config(cfg, folder / "config.yaml"), save_config(cfg, folder / "config.json")
    train_bpe([TEXT * 20], 290).save(folder)
    save_state(folder / "checkpoints" / f"step-{step}", dict(model=model.state_dict(), formats=block_formats(model), guards=[], placement=None, step=step))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory): return write_run(tmp_path_factory.mktemp("served") / "a run")


@pytest.fixture(scope="module")
def folder(run): return served_folder(run)


def test_a_run_is_exported_once_a_step(run, folder, tmp_path):
    assert folder == run / "export" / "hf-step-3" and (folder / "modeling_hsmoe.py").is_file()
    written = (folder / "config.json").stat().st_mtime_ns
    assert served_folder(run) == folder and served_folder(folder) == folder and (folder / "config.json").stat().st_mtime_ns == written
    with pytest.raises(ConfigError, match="leave out --step"): served_folder(folder, 3)
    with pytest.raises(TrainingError): served_folder(run, 4)
    with pytest.raises(TrainingError): served_folder(tmp_path)
    assert [p.name for p in (run / "export").iterdir()] == ["hf-step-3"]


@torch.no_grad()
def test_what_is_served_is_the_native_model_without_rounding_in_attention(folder):
    from transformers import AutoModelForCausalLM
    native, ids = import_hf(folder)[0], torch.randint(3, 290, (2, 40), generator=torch.Generator().manual_seed(1))
    trained = native(ids)[0][:]
    want = as_served(native)(ids)[0][:]
    lm = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **{k: v for k, v in SERVED.items() if k != "head_dtype"})
    assert (lm(ids).logits - want).abs().max() <= 1e-5 and (trained - want).abs().max() > 1e-3


def test_vllm_finds_the_attention_of_the_exported_module(folder):
    "vLLM reads `forward`: one name that is assigned from ALL_ATTENTION_FUNCTIONS, and one call of it. And no config name that means SiLU experts to it."
    from hsmoe.hf.configuration_hsmoe import HsmoeConfig
    from hsmoe.hf.modeling_hsmoe import HsmoeAttention
    tree = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(HsmoeAttention.forward)))))
    bases = lambda value: getattr(getattr(getattr(value, "func", value), "value", None), "id", None)
    names = [n.targets[0].id for n in tree if isinstance(n, ast.Assign) and bases(n.value) == "ALL_ATTENTION_FUNCTIONS"]
    assert len(names) == 1 and sum(isinstance(n, ast.Call) and getattr(n.func, "id", None) == names[0] for n in tree) == 1
    assert not {"num_experts", "n_routed_experts", "num_local_experts"} & (json.loads((folder / "config.json").read_text()).keys() | vars(HsmoeConfig()).keys())


@pytest.fixture
def forgotten():
    "What the test registers with `transformers` is gone afterwards"
    from hsmoe.hf.configuration_hsmoe import HsmoeConfig
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    yield
    CONFIG_MAPPING._extra_content.pop("hsmoe", None)
    for auto in (AutoModel, AutoModelForCausalLM): auto._model_mapping._extra_content.pop(HsmoeConfig, None)


def test_the_plugin_is_announced_and_registers(folder, tmp_path, monkeypatch, forgotten):
    subprocess.run([sys.executable, "setup.py", "-q", "egg_info", "-e", str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
    (plugin,) = importlib.metadata.Distribution.at(next(tmp_path.glob("*.egg-info"))).entry_points.select(group="vllm.general_plugins")
    assert plugin.load() is serving.register
    class TransformersForCausalLM:
        def __init__(self, *, vllm_config, prefix): self.seen = dict(vars(vllm_config.model_config.hf_config))
    known = {}
    parts = {name: types.ModuleType(name) for name in ("vllm", "vllm.model_executor", "vllm.model_executor.models", "vllm.model_executor.models.transformers")}
    parts["vllm"].ModelRegistry = types.SimpleNamespace(register_model=known.__setitem__)
    parts["vllm.model_executor.models.transformers"].TransformersForCausalLM = TransformersForCausalLM
    for name, module in parts.items(): monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(vars(serving), "ServedHsmoe", raising=False)
    serving.register(), serving.register()
    module, name = known["HsmoeForCausalLM"].split(":")
    served = getattr(sys.modules[module], name)
    monkeypatch.delitem(vars(serving), "ServedHsmoe")
    given = types.SimpleNamespace(model_config=types.SimpleNamespace(hf_config=types.SimpleNamespace(attention_quantization=True, hidden_size=64)))
    assert issubclass(served, TransformersForCausalLM) and served(vllm_config=given).seen == dict(SERVED, hidden_size=64)
    from transformers import AutoConfig, AutoModel
    config = AutoConfig.from_pretrained(folder)                                             # without trust_remote_code: the package's own class
    assert type(config).__module__ == "hsmoe.hf.configuration_hsmoe"
    with torch.device("meta"): assert type(AutoModel.from_config(config)).__module__ == "hsmoe.hf.modeling_hsmoe"


def test_the_command_line(run, hsmoe_cli, tmp_path, monkeypatch):
    python = tmp_path / "python of vllm"
    python.write_text('#!/bin/sh\n[ "$2" = serve ] || [ "$3" = serve ] || exit 0\nfor a in "$@"; do printf "%s\\0" "$a"; done > "$0.args"\n')
    python.chmod(0o755)
    done = hsmoe_cli("serve", run, "--port", "8123", "--vllm-python", python, "--max-num-seqs", "8")
    assert done.returncode == 0, done.stderr
    args = Path(f"{python}.args").read_text().split("\0")[2:-1]
    value = dict(zip(args, args[1:]))
    assert args[:2] == ["serve", str(run / "export" / "hf-step-3")] and args[-2:] == ["--max-num-seqs", "8"]
    assert value["--host"] == "127.0.0.1" and value["--dtype"] == "float32" and value["--port"] == "8123" and json.loads(value["--hf-overrides"]) == SERVED and value["--model-impl"] == "transformers"
    monkeypatch.delenv("HSMOE_VLLM_PYTHON", raising=False)
    other = write_run(tmp_path / "other")
    for more, told in (((), "vLLM is not installed"), (("--vllm-python", "nowhere"), "no Python interpreter")):
        if not more and importlib.util.find_spec("vllm"): continue
        with pytest.raises(ConfigError, match=told) as e: serving.serve(other, *more[1:])
        assert "pip install" in str(e.value) and "\n" not in str(e.value)
    assert not (other / "export").exists()


def test_a_server_is_ended_whatever_happens_inside(tmp_path):
    code = ("import http.server as h, subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\nprint(child.pid, flush=True)\n"
            "class H(h.BaseHTTPRequestHandler):\n    def do_GET(self): self.send_response(200); self.end_headers()\n"
            "h.ThreadingHTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()")
    with pytest.raises(KeyError), Server(lambda port: [sys.executable, "-c", code, str(port)], tmp_path / "log") as server: raise KeyError("inside")
    child = int((tmp_path / "log").read_text().splitlines()[0])
    assert server.process.returncode is not None
    for _ in range(50):                                                                    # the child is init's to reap
        with contextlib.suppress(OSError):
            if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z": time.sleep(0.1); continue
        break
    else: pytest.fail("the server's child lives on")
    late = Server(lambda port: [sys.executable, "-c", "import time; print('loading', flush=True); time.sleep(300)"], tmp_path / "log", patience=1.5)
    with pytest.raises(ConfigError, match="does not answer after 1.5 s .loading."): late.__enter__()
    assert late.process.returncode is not None


class Endpoint(BaseHTTPRequestHandler):
    "Streams `max_tokens` tokens, 5 ms each, and remembers what it was asked"
    asked = []
    def log_message(self, *a): pass
    def do_GET(self): self.send_error(404)
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if body["model"] != "hsmoe": return self.send_error(404)
        self.send_response(200), self.end_headers()
        n = body["prompt"] if isinstance(body["prompt"], list) else body["prompt"].split()
        for data in [dict(choices=[dict(text="x")])] * body["max_tokens"] + [dict(choices=[], usage=dict(prompt_tokens=len(n), completion_tokens=body["max_tokens"]))]:
            time.sleep(0.005)
            self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture
def endpoint():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    Endpoint.asked.clear()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown(), server.server_close()


def test_profiling_any_endpoint(endpoint, tmp_path, capsys):
    profiling = script("profile_serving")
    given = ["--out", str(tmp_path / "new folder" / "p"), "--batches", "1,3", "--prompt-lengths", "6", "--new-tokens", "4", "--rounds", "2", "--price", "0.98", "--shared", "0.5", "--card", "a card"]
    profiling.main([endpoint, *given])
    record = json.loads((tmp_path / "new folder" / "p.json").read_text())
    assert (tmp_path / "new folder" / "p.png").stat().st_size > 10_000 and record["card"] == "a card" and record["server"] == urlsplit(endpoint).netloc
    assert [(c["batch"], c["shared"], c["prompt_tokens"], c["new_tokens"]) for c in record["cells"]] == [(1, 0, 6, 4), (1, 0.5, 6, 4), (3, 0, 6, 4), (3, 0.5, 6, 4)]
    for c in record["cells"]:
        assert 0.005 <= c["ttft_s"] and 0.005 <= c["tpot_s"] and c["output_tokens_per_s"] <= c["batch"] * 4 / 0.02
        assert c["dollars_per_million_output"] == pytest.approx(0.98 / 3600 * 1e6 / c["output_tokens_per_s"]) and c["dollars_per_million_total"] == pytest.approx(0.4 * c["dollars_per_million_output"])
    prompts = [body["prompt"] for body in Endpoint.asked if body["max_tokens"] == 4]
    assert len(prompts) == 2 * (1 + 3) * 3 and all(isinstance(p, str) and body["ignore_eos"] for p, body in zip(prompts, Endpoint.asked)) and "cheapest at" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="status 404"): profiling.main([endpoint, *given, "--model", "another"])
    with pytest.raises(ConfigError, match="server already"): profiling.main([endpoint, *given, "--", "--max-num-seqs", "4"])
    for wrong in (["--batches", "1,x"], ["--shared", "1"], ["--rounds", "0"]):
        with pytest.raises(SystemExit) as e: profiling.main([endpoint, *given, *wrong])
        assert e.value.code == 2


def test_what_tensorrt_llm_is_given(folder, tmp_path, capsys):
    import yaml
    building = script("trtllm_build")
    building.main([str(folder), str(tmp_path / "trt"), "--gpus", "2", "--max-seq-len", "48"])
    line = capsys.readouterr().out
    assert line.startswith("trtllm-serve ") and "--backend _autodeploy" in line and str(tmp_path / "trt" / "autodeploy.yaml") in line
    options, config = yaml.safe_load((tmp_path / "trt" / "autodeploy.yaml").read_text()), json.loads((tmp_path / "trt" / "config.json").read_text())
    assert options["world_size"] == 2 and options["max_seq_len"] == 48 and options["kv_cache_config"]["enable_block_reuse"] and options["enable_chunked_prefill"]
    assert {k: config[k] for k in SERVED} == SERVED and config["dtype"] == "bfloat16"
    with pytest.raises(ConfigError, match="must not exceed"): building.main([str(folder), str(tmp_path / "second"), "--max-seq-len", "65"])
    with pytest.raises(ConfigError, match="multiples of 8"): building.served_config(dict(hidden_size=60, moe_intermediate_size=32))
    with pytest.raises(ConfigError, match="packed"): building.served_config(dict(quantization_config={}))
    assert [p.name for p in tmp_path.iterdir()] == ["trt"]


@pytest.mark.slow
@torch.no_grad()
def test_what_tensorrt_llm_is_given_can_be_traced_and_is_the_model(folder, tmp_path):
    import torch.nn.functional as F
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_utils import AttentionInterface
    building, out = script("trtllm_build"), tmp_path / "trt"
    building.main([str(folder), str(out)])
    AttentionInterface.register("traced", lambda module, q, k, v, mask, scaling, **kw: (F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling).transpose(1, 2), None))
    load = lambda path, **kw: AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, dtype=torch.bfloat16, attn_implementation="traced", **kw).eval()
    ids = torch.randint(3, 290, (2, 16), generator=torch.Generator().manual_seed(1))
    want = load(folder, attention_quantization=False)(ids).logits
    assert (load(out)(ids).logits - want).abs().max() <= 0.02 * want.std()
    config = AutoConfig.from_pretrained(out, trust_remote_code=True)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config, trust_remote_code=True, dtype=torch.bfloat16, attn_implementation="traced").eval()
        ids = torch.zeros(2, 8, dtype=torch.long)
    free = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", max=64)}
    graph = torch.export.export(lm, (), dict(input_ids=ids, position_ids=ids, use_cache=False), dynamic_shapes=dict(input_ids=free, position_ids=free, use_cache=None), strict=False).graph
    called = [str(n.target) for n in graph.nodes if n.op == "call_function"]
    assert sum("grouped_mm" in n for n in called) == 2 and sum("scaled_dot_product" in n for n in called) == 1


CLIENT = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
from openai import OpenAI
url, prompts, new = json.load(sys.stdin)
client = OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
def ask(prompt):
    more = dict(ignore_eos=True, return_token_ids=True)
    choice = client.completions.create(model="hsmoe", prompt=prompt, max_tokens=new, temperature=0, logprobs=1, extra_body=more).choices[0]
    return dict(ids=choice.token_ids, logprobs=choice.logprobs.token_logprobs, text=choice.text)
with ThreadPoolExecutor(16) as pool: answers = list(pool.map(ask, prompts))
stream = client.completions.create(model="hsmoe", prompt=prompts[0], max_tokens=new, temperature=0, stream=True, extra_body=dict(ignore_eos=True))
text = "".join(event.choices[0].text for event in stream if event.choices)
json.dump(dict(models=[m.id for m in client.models.list()], answers=answers, streamed=text), sys.stdout)
"""
NEAR_TIE = 0.05        # nats between the two candidates of a first difference


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    "HSMOE_SERVED_RUN, or tiny after 200 steps on the standard library's sources"
    given = os.environ.get("HSMOE_SERVED_RUN")
    if given: return Path(given)
    out = tmp_path_factory.mktemp("trained") / "run"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "hsmoe.cli", "train", "--run-dir", str(out), "train.length=200 steps", "train.wandb='off'", "train.threads=1"], cwd=out.parent, env=env, check=True, capture_output=True)
    return out


def windows(tokenizer, new_tokens, context):
    "50 prompts of the standard library's sources, in pairs that share their first 36 ids"
    import sysconfig
    files = sorted(p for p in Path(sysconfig.get_path("stdlib")).glob("*.py") if p.stat().st_size > 4000)[::4][:25]
    texts = [[tokenizer.bos_id] + tokenizer.encode(p.read_text(encoding="utf-8")[1000:3000]) for p in files]
    prompts = [ids[:n] for ids in texts for n in (36, context - new_tokens)]
    assert len(prompts) == 50
    return prompts


@pytest.mark.slow
@pytest.mark.skipif(not VLLM, reason="HSMOE_VLLM_PYTHON names no interpreter with vLLM")
@pytest.mark.parametrize("way", ["hsmoe serve", "plugin"])
@torch.no_grad()
def test_vllm_writes_the_tokens_of_the_native_model(trained, tmp_path, way):
    from hsmoe.train.loop import load_run, run_tokenizer
    folder, more, new = export_run(trained, "hf", tmp_path / "hf").folder, ["--block-size", "32", "--max-num-seqs", "16", "--enable-prefix-caching", "--enable-chunked-prefill", "--max-num-batched-tokens", "64"], 20
    model, tokenizer = as_served(load_run(trained)[0]), run_tokenizer(trained)
    prompts = windows(tokenizer, new, model.max_seq_len)
    ours = [generate(model, torch.tensor([p]), new, temperature=0, vocab_size=tokenizer.vocab_size)[0, len(p):].tolist() for p in prompts]
    env = dict(VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1")
    command = lambda port: [sys.executable, "-m", "hsmoe.cli", "serve", str(folder), "--port", str(port), "--vllm-python", VLLM, *more]
    if way == "plugin":
        for name in ("configuration_hsmoe.py", "modeling_hsmoe.py"): (folder / name).unlink()               # nothing in the folder is run
        subprocess.run([sys.executable, "setup.py", "-q", "egg_info", "-e", str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
        env["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT}"
        command = lambda port: [VLLM, "-c", serving._VLLM, "serve", str(folder), "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "hsmoe", "--enforce-eager", "--dtype", "float32", *more]
    with Server(command, tmp_path / "log", env=env) as server:
        done = subprocess.run([VLLM, "-c", CLIENT], input=json.dumps([server.url, prompts, new]), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        with contextlib.closing(http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)) as connection:
            connection.request("GET", "/metrics")
            metrics = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in connection.getresponse().read().decode().splitlines() if line.startswith("vllm:prefix_cache")}
    got = json.loads(done.stdout)
    theirs = [a["ids"] for a in got["answers"]]
    parted = divergences(model, prompts, ours, theirs)
    off = 0.0
    for prompt, answer in zip(prompts, got["answers"]):
        logp = model(torch.tensor([prompt + answer["ids"]]))[0][0, len(prompt) - 1:-1].log_softmax(-1)
        off = max(off, *(logp[range(new), answer["ids"]] - torch.tensor(answer["logprobs"])).abs().tolist())
    print(f"{way}: {50 - len(parted)} of 50 continuations equal, first differences {parted}, largest difference of a log-probability {off:.1e}, prefix cache {metrics}")
    assert got["models"] == ["hsmoe"] and got["streamed"] == got["answers"][0]["text"] and len({tuple(t) for t in theirs}) > 25
    assert all(d.gap <= NEAR_TIE for d in parted) and len(parted) <= 5
    assert metrics["vllm:prefix_cache_hits_total"] >= 32 * 20
    assert server.process.returncode is not None
