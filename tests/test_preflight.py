"""The list before a long run: what `nvidia-smi` says, machines that are not here, versions, and every row made to fail by what it is there to find."""
import json, math, os, runpy, shutil, sys
from pathlib import Path

import psutil, pytest, torch
from typer.testing import CliRunner

from hsmoe import preflight as pre
from hsmoe.cli import app
from hsmoe.config import ConfigError, load_config
from hsmoe.data.corpus import Corpus
from hsmoe.preflight import FAIL, NONE, PASS, WARN, Gpu, Machine, allowed, hardware_checks, parse_nvlink, preflight, sizes, stack_checks, verdict
from hsmoe.model.hybrid import build_model
from hsmoe.train.checkpoint import split_state
from hsmoe.train.loop import TrainingError, make_optimizer

from conftest import ROOT

# As nvidia-smi printed it: a server with seven B300, and an H100 PCIe with a bridge of which six links are down. (Identifiers are shortened; links and GPUs that say the same are repeated here.)
B300_LINKS = "".join(f"GPU {i}: NVIDIA B300 SXM6 AC (UUID: GPU-bce5282f-d716-d136-5759-{i})\n" + "".join(f"         Link {k}: 53.125 GB/s\n" for k in range(18)) for i in range(7))
B300_TOPOLOGY = """        GPU0    GPU1    GPU2    GPU3    GPU4    GPU5    GPU6    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      NV18    NV18    NV18    NV18    NV18    NV18    0,2,4,6,8,10    0               N/A
GPU1    NV18     X      NV18    NV18    NV18    NV18    NV18    0,2,4,6,8,10    0               N/A
GPU2    NV18    NV18     X      NV18    NV18    NV18    NV18    0,2,4,6,8,10    0               N/A
GPU3    NV18    NV18    NV18     X      NV18    NV18    NV18    1,3,5,7,9,11    1               N/A
GPU4    NV18    NV18    NV18    NV18     X      NV18    NV18    1,3,5,7,9,11    1               N/A
GPU5    NV18    NV18    NV18    NV18    NV18     X      NV18    1,3,5,7,9,11    1               N/A
GPU6    NV18    NV18    NV18    NV18    NV18    NV18     X      1,3,5,7,9,11    1               N/A

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""
H100_LINKS = "GPU 0: NVIDIA H100 PCIe (UUID: GPU-6968dfc2)\n" + "".join(f"\t Link {k}: {'<inactive>' if k in (4, 5, 10, 11, 16, 17) else '26.562 GB/s'}\n" for k in range(18))
B300 = Gpu("NVIDIA B300 SXM6 AC", int(288e9), int(287e9), (10, 3))
TARGET = Machine((B300,) * 4, B300_LINKS, B300_TOPOLOGY, (0, 1, 2, 3))
FIVE = load_config("5b")


def by_item(checks, part="hardware"): return {c.item: (c.verdict, c.reason) for c in checks if c.part == part}
def wrong(checks): return {c.item: c.reason for c in checks if c.verdict in (FAIL, WARN)}


# ---- hardware

def test_links_as_nvidia_smi_says_them():
    links = parse_nvlink(B300_LINKS)
    assert list(links) == list(range(7)) and all(rates == [53.125] * 18 for rates in links.values())
    h100 = parse_nvlink(H100_LINKS)[0]
    assert len(h100) == 18 and [k for k, rate in enumerate(h100) if rate == 0] == [4, 5, 10, 11, 16, 17] and sum(h100) == pytest.approx(12 * 26.562)
    assert parse_nvlink("GPU 0: NVIDIA L4 (UUID: GPU-0)\n\t Link 0: <inactive>\n\t Link 1: (Not supported)\n\t Link 2: 0 GB/s\n") == {0: [0.0] * 3}
    assert parse_nvlink("") == parse_nvlink("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.") == {}


def test_the_target_passes():
    assert wrong(hardware_checks(FIVE, TARGET)) == {} and all(c.verdict == PASS and c.row == "H-05" for c in hardware_checks(FIVE, TARGET))
    assert wrong(hardware_checks(load_config("literal"), TARGET)) == {}
    assert wrong(hardware_checks(FIVE, TARGET._replace(visible=(6, 2, 3, 4)))) == {}


def replaced(text, gpu, link, says):
    lines = text.splitlines(keepends=True)
    lines[19 * gpu + 1 + link] = f"         Link {link}: {says}\n"
    return "".join(lines)


@pytest.mark.parametrize("machine, off", [
    (TARGET._replace(gpus=TARGET.gpus[:3], visible=(0, 1, 2)), dict(GPUs="the target is 4 × NVIDIA B300, and this machine has 3")),
    (TARGET._replace(gpus=(B300, B300, B300._replace(name="NVIDIA B200"), B300)), dict(name="GPU 2 is an NVIDIA B200, and the target is an NVIDIA B300")),
    (TARGET._replace(gpus=(B300._replace(memory_bytes=int(192e9)),) * 4), dict(memory="a GPU has 192 GB, and the target has 288 GB")),
    (TARGET._replace(gpus=(B300._replace(capability=(10, 0)), *TARGET.gpus[1:])), dict(capability="compute capability 10.0, and the target has 10.3")),
    (TARGET._replace(nvlink=replaced(B300_LINKS, 3, 7, "<inactive>")), dict(NVLink="GPU 3 has 17 links of 53.125 GB/s up, and the target has 18 of 50 GB/s (nvidia-smi nvlink -s)")),
    (TARGET._replace(nvlink=replaced(B300_LINKS, 1, 0, "26.562 GB/s")), dict(NVLink="GPU 1 has 18 links of 26.562 GB/s up, and the target has 18 of 50 GB/s (nvidia-smi nvlink -s)")),
    (TARGET._replace(nvlink=""), dict(NVLink="GPU 0 has 0 links up, and the target has 18 of 50 GB/s (nvidia-smi nvlink -s)")),
    (TARGET._replace(topology=B300_TOPOLOGY.replace("NV18     X      NV18", "SYS      X      SYS ")), dict(topology="no NVLink between GPU 0 and GPU 1; it must be a full mesh or a ring")),
    (TARGET._replace(topology="command not found"), dict(topology="nvidia-smi topo -m cannot be read: the text has no header line that begins with GPU0; give the output of nvidia-smi topo -m")),
    (TARGET._replace(visible=(4, 5, 6, 7)), dict(NVLink="GPU 7 has 0 links up, and the target has 18 of 50 GB/s (nvidia-smi nvlink -s)", topology="nvidia-smi topo -m has no row for each of the GPUs 4, 5, 6, 7")),
    (Machine(), dict(GPUs="the target is 4 × NVIDIA B300, and this machine has none"))])
def test_the_row_that_is_off_is_named(machine, off):
    checks = hardware_checks(FIVE, machine)
    assert wrong(checks) == off and verdict(checks) == FAIL
    let = allowed(checks)
    assert verdict(let) == WARN and all(reason == f"{off[item]}; let through by --allow-any-hardware" for item, reason in wrong(let).items())


def test_a_ring_will_do_and_more_gpus_are_told():
    ring = "        GPU0 GPU1 GPU2 GPU3\n" + "".join(f"GPU{i} " + " ".join("X" if i == j else "NV9" if (i - j) % 4 in (1, 3) else "SYS" for j in range(4)) + "\n" for i in range(4))
    assert by_item(hardware_checks(FIVE, TARGET._replace(topology=ring)))["topology"] == (PASS, "NVLink in a ring")
    seven = TARGET._replace(gpus=(B300,) * 7, visible=tuple(range(7)))
    assert wrong(hardware_checks(FIVE, seven)) == dict(GPUs="the target has 4 GPUs, and this machine has 7; the first 4 are used")
    busy = TARGET._replace(gpus=(B300, B300._replace(free_bytes=int(200e9)), B300, B300))
    assert wrong(hardware_checks(FIVE, busy)) == dict(memory="of the 288 GB of GPU 1, 88 GB are in use already")


def test_other_runs_need_what_they_have_processes_for():
    h200 = Gpu("NVIDIA H200", int(150e9), int(149e9), (9, 0))
    one, two = Machine((h200,), H100_LINKS, "", (0,)), Machine((h200,) * 2, B300_LINKS.replace("53.125", "26.562"), B300_TOPOLOGY, (0, 1))
    alone, both = load_config("5b", ["parallel.dp=1", "parallel.ep=1"]), load_config("tiny", ["parallel.dp=2", "parallel.ep=2"])
    assert [c.verdict for c in hardware_checks(alone, one)] == [PASS] * 4 + [NONE] * 2 and [c.verdict for c in hardware_checks(both, two)] == [PASS] * 6
    assert [c.verdict for c in hardware_checks(load_config("tiny"), Machine())] == [NONE] * 6 == [c.verdict for c in hardware_checks(load_config("tiny", ["train.device=cpu"]), one)]
    assert wrong(hardware_checks(both, one))["GPUs"] == "the run needs 2 GPUs, one a process, and this machine has 1"
    assert wrong(hardware_checks(load_config("tiny", ["train.device=cuda"]), Machine())) == dict(GPUs="the run needs 1 GPU, one a process, and this machine has none")
    assert wrong(hardware_checks(both, two._replace(nvlink="", topology=B300_TOPOLOGY.replace("NV18", "PHB ")))) == dict(
        NVLink="GPU 0 has 0 links up: what GPUs send each other goes by PCI Express", topology="no NVLink between GPU 0 and GPU 1; it must be a full mesh or a ring")
    assert wrong(hardware_checks(both, two._replace(nvlink=H100_LINKS + H100_LINKS.replace("GPU 0", "GPU 1")))) == dict(NVLink="GPU 0 has 12 links of 26.562 GB/s up and 6 down")
    assert wrong(hardware_checks(both, two._replace(gpus=(h200, h200._replace(name="NVIDIA A100", capability=(7, 5)))))) == dict(
        name="the GPUs are not alike: NVIDIA A100, NVIDIA H200", capability="compute capability 7.5 is below 8.0: no bfloat16, and none of the kernels")


# ---- stack

GOOD = {"python": "3.11.9", "torch": "2.13.0+cu128", "cuda": "12.8", "nccl": "2.27.5", "triton": "3.6.0", "torchao": "0.18.0", "megatron-core": "0.17.1"}


@pytest.mark.parametrize("changed, item, says", [
    (dict(torch="2.5.1"), "PyTorch", (FAIL, "2.5.1 is older than 2.6.0")), (dict(torch="2.14.0.dev20261101"), "PyTorch", (WARN, "2.14.0.dev20261101 is newer than 2.13.0, the newest that was tried")), (dict(torch="2.6.0"), "PyTorch", (PASS, "2.6.0 is at least 2.6.0")),
    (dict(cuda="12.4"), "CUDA", (WARN, "12.4 does, and 12.6 or newer is better")), (dict(cuda="13.0"), "CUDA", (PASS, "13.0 is at least 12.6")), (dict(cuda="11.8"), "CUDA", (FAIL, "11.8 is older than 12.2")), (dict(cuda=None), "CUDA", (FAIL, "PyTorch is built without CUDA")),
    (dict(nccl="2.20.5"), "NCCL", (FAIL, "2.20.5 is older than 2.21")), (dict(nccl="2.21.5"), "NCCL", (WARN, "2.21.5 does, and 2.23 or newer is better")), (dict(nccl=None), "NCCL", (FAIL, "PyTorch has no NCCL")),
    ({"megatron-core": "2.0.0"}, "Megatron Core", (FAIL, "2.0.0 is not in >=0.16,<2.0")), ({"megatron-core": None}, "Megatron Core", (NONE, "not installed; process groups are made without it")),
    (dict(python="3.12.3"), "Python", (WARN, "3.12.3, and the request asks for 3.10 or 3.11; the source runs on newer ones")), (dict(python="3.9.1"), "Python", (FAIL, "3.9.1 is older than 3.10")),
    (dict(triton=None), "Triton", (WARN, "not installed: every operation runs by its reference, many times slower"))])
def test_versions(changed, item, says):
    assert wrong(stack_checks(FIVE, GOOD, True, FIVE.printed)) == {}
    assert by_item(stack_checks(FIVE, GOOD | changed, True, FIVE.printed), "stack")[item] == says


def test_on_a_cpu_and_pins(monkeypatch):
    cpu = by_item(stack_checks(load_config("tiny"), GOOD | dict(cuda=None, nccl=None, triton=None), False, FIVE.printed), "stack")
    assert {cpu[item][0] for item in ("CUDA", "NCCL", "Triton")} == {NONE} and wrong(stack_checks(load_config("tiny"), pre.installed(), False, FIVE.printed)).keys() <= {"Python", "PyTorch"}
    pins = pre.pinned((ROOT / "pins.txt").read_text())
    assert pins["torch"] == ["2.13.0"] and pins["megatron-core"] == ["0.16.1"] and len(pins) > 100 and len(pins["numpy"]) == 2
    monkeypatch.setattr(pre, "pinned", lambda text: dict(torch=["1.0"], numpy=["1", pre.importlib.metadata.version("numpy")], nothing=["3"]))
    assert pre._pins() == (WARN, f"1 of 2 packages have another version than pinned: torch {pre.importlib.metadata.version('torch')} (1.0)")
    assert pre._environment(dict(NCCL_DEBUG="INFO", CUDA_LAUNCH_BLOCKING="1")) == (WARN, "for debugging, and slow: NCCL_DEBUG=INFO, CUDA_LAUNCH_BLOCKING=1") and pre._environment(dict(NCCL_DEBUG="WARN"))[0] == PASS


# ---- the whole list, on a small run

@pytest.fixture
def call(tmp_path, monkeypatch, small_corpus, small_overrides):
    "The list for a run of two hundred steps on the small corpus, on this machine."
    monkeypatch.chdir(tmp_path)
    def run(*overrides, corpus=small_corpus, **kw):
        return preflight("tiny", [*small_overrides, "model.n_layers=1", "train.device=cpu", "train.length=200 steps", *overrides], corpus_dir=corpus, **kw)
    return run


def test_a_run_that_can_begin(call, tmp_path):
    checks, record = call("train.tensorboard=true", f"guards.alerts={json.dumps([dict(file=str(tmp_path / 'alerts'))])}")
    assert {c.verdict for c in checks} <= {PASS, NONE, WARN} and {c.item for c in checks if c.verdict == WARN} <= {"code", "pins", "Python", "PyTorch"}
    assert [p for p in dict.fromkeys(c.part for c in checks)] == list(pre.PARTS) and all(c.reason and "\n" not in c.reason for c in checks)
    run, data = by_item(checks, "dry run"), by_item(checks, "data")
    assert run["seeds"] == (PASS, "seed 1234 gives the same losses and gradient norms again") and "200 of them take" in run["two steps"][1]
    assert data["checksums"][0] == data["vocabulary"][0] == PASS and by_item(checks, "logging")["records"] == (PASS, "metrics.jsonl has the 2 steps")
    said = json.loads((tmp_path / "alerts").read_text())
    assert (said["event"], said["run"]) == ("preflight", "tiny") and os.listdir(tmp_path) == ["alerts"]      # what was tried is gone
    assert json.loads(json.dumps(record))["config_hash"] == by_item(checks, "hashes")["configuration"][1] and record["environment"]["seeds"]["torch"] == 1234


@pytest.mark.parametrize("more", [[], ["optim.states=linear", "optim.block_size=128"], ["train.dtype=bfloat16", "optim.block_size=512"], ["train.dtype=bfloat16", "quant.weight_format=null"]])
def test_how_much_a_checkpoint_takes(small_overrides, more):
    "The bytes that were counted, beside those of a model and its optimiser."
    cfg = load_config("tiny", small_overrides + more)
    model = build_model(cfg)
    tensors, _ = split_state(dict(model=model.state_dict(), optimizer=make_optimizer(model, cfg).state_dict()))
    kept = sum(t.numel() * t.element_size() for t in {t.data_ptr(): t for t in tensors.values()}.values())
    counted = sizes(cfg)
    assert counted.checkpoint == pytest.approx(kept, rel=0.01) and counted.process == pytest.approx(kept + 4 * sum(p.numel() for p in model.parameters()), rel=0.01)


def test_damage_to_the_corpus(call, tmp_path, small_corpus):
    shutil.copytree(small_corpus, tmp_path / "corpus")
    shard = next((tmp_path / "corpus").glob("train-*.tokens.bin"))
    data = bytearray(shard.read_bytes()); data[100] ^= 1; shard.write_bytes(data)
    checks, _ = call(corpus=tmp_path / "corpus")
    assert verdict(checks) == FAIL and shard.name in by_item(checks, "data")["text"][1] and by_item(checks, "dry run")["two steps"] == (NONE, "not tried, since data, text failed")
    assert by_item(call(corpus=tmp_path / "none")[0], "data")["text"][0] == FAIL
    assert by_item(call("model.vocab_size=290")[0], "data")["vocabulary"][0] == FAIL


def test_folder_and_disk(call, tmp_path, monkeypatch):
    (tmp_path / "file").write_text(""); (tmp_path / "run").mkdir(); (tmp_path / "run/config.yaml").write_text("")
    assert by_item(call(run_dir="file/run")[0], "checkpoints")["folder"] == (FAIL, f"folder file/run cannot be written: {tmp_path}/file is a file")
    assert by_item(call(run_dir="run")[0], "checkpoints")["folder"] == (FAIL, "run already holds a run; resume it or choose another folder")
    monkeypatch.setattr(pre.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 10_000))
    checks, _ = call()
    assert by_item(checks, "checkpoints")["disk"][0] == FAIL and "of 0.01 MB that are free" in by_item(checks, "checkpoints")["disk"][1]


def test_a_configuration_that_cannot_run(call, monkeypatch):
    checks, _ = call("schedule.warmup=300")
    assert wrong(checks)["length"] == "schedule.warmup = 300 steps must not exceed the 200 steps of the run" and by_item(checks, "checkpoints")["written and read"][0] == NONE
    assert "in minutes is for one process" in wrong(call("parallel.dp=2", "train.length=3 minutes")[0])["length"]
    with pytest.raises(ConfigError, match="nearest known key"): call("model.n_layerz=2")
    for name, value in dict(WORLD_SIZE="2", RANK="0", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="1234").items(): monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="without torchrun"): call()


def test_what_two_steps_can_find(call, monkeypatch, small_overrides):
    cfg, good = load_config("tiny", small_overrides + ["train.length=7200 steps"]), pre.Trial(Path("run"), [12.0, 11.5], [1.0, 2.0], math.log(300), 0.5, int(1e9))
    assert pre._steps_said(cfg, good) == (PASS, "losses 12.000 and 11.500, the second step in 0.5 s; 7,200 of them take 60 min")
    assert pre._steps_said(cfg, good._replace(losses=[12.0, math.nan]))[0] == pre._steps_said(cfg, good._replace(norms=[math.inf, 1.0]))[0] == FAIL
    assert pre._steps_said(cfg, good._replace(next_token=9.9)) == (WARN, "the first next-token loss is 9.90, and guessing among 300 ids is 5.70")
    other = good._replace(norms=[1.0, 2.0000001])
    assert pre._seeds(cfg, good, good, True)[0] == PASS and pre._seeds(cfg, good, other, False)[0] == FAIL and pre._seeds(cfg, good, other, True)[0] == WARN
    assert pre._seeds(load_config("tiny", ["train.deterministic=true"]), good, other, True)[0] == FAIL
    assert pre._peak(good, True, TARGET) == (PASS, "1 GB at the most, of 288 GB") and pre._peak(good._replace(peak_bytes=int(280e9)), True, TARGET)[0] == WARN and pre._peak(good._replace(peak_bytes=10**15), False, TARGET)[0] == FAIL
    for error, says in ((TrainingError("the loss is not finite"), "the loss is not finite"), (IndexError("list index\nout of range"), "IndexError: list index out of range")):
        def ends(*a): raise error
        monkeypatch.setattr(pre, "_trial", ends)
        assert by_item(call()[0], "dry run") == {"two steps": (FAIL, says), "seeds": (NONE, "the two steps failed"), "memory": (NONE, "the two steps failed")}


def test_several_processes_that_fail_or_hang(tmp_path, monkeypatch):
    program = lambda code: [sys.executable, "-S", "-c", code]
    pre._launch(program("print('fine')"))
    with pytest.raises(TrainingError, match="^the first reason$"): pre._launch(program("print('noise\\nhsmoe: the first reason\\nhsmoe: another'); raise SystemExit(2)"))
    with pytest.raises(TrainingError, match="torchrun ended with exit code 3: noise last words"): pre._launch(program("print('noise'); print('last words'); raise SystemExit(3)"))
    monkeypatch.setattr(pre, "HANGS_AFTER", 0.5)
    pid = tmp_path / "pid"
    with pytest.raises(TrainingError, match="did not finish two steps"): pre._launch(["bash", "-c", f"setsid sleep 60 & echo $! > {pid}; wait"])
    child = int(pid.read_text())
    assert not psutil.pid_exists(child) or psutil.wait_procs([psutil.Process(child)], 5)[1] == []


def test_a_checkpoint_that_cannot_be_read(call, monkeypatch):
    real = pre._trial
    def spoilt(*a):
        t = real(*a)
        path = next((t.run / "checkpoints/step-2").glob("*.distcp"))
        data = bytearray(path.read_bytes()); data[len(data) // 2] ^= 1; path.write_bytes(data)
        return t
    monkeypatch.setattr(pre, "_trial", spoilt)
    verdict_, reason = by_item(call()[0], "checkpoints")["written and read"]
    assert verdict_ == FAIL and "is damaged: the checksum of" in reason


def test_alerts_and_guards(call):
    checks, _ = call("guards.enabled=false", "guards.alerts=[{command: 'exit 4'}]", "optim.peak_lr=3e-3", "schedule.warmup=300")
    assert by_item(checks, "monitoring") == dict(guards=(WARN, "guards.enabled is false: a NaN ends the run"), alerts=(FAIL, "alert by command 'exit 4' failed: its exit code is 4"))


def test_the_command(tmp_path, monkeypatch, small_corpus, small_overrides):
    monkeypatch.chdir(tmp_path)
    def call(*args):
        result = CliRunner().invoke(app, ["preflight", *map(str, args)])
        assert result.exception is None or isinstance(result.exception, (SystemExit, ConfigError)), result.exception
        return result
    small = ["--corpus", small_corpus, *small_overrides, "model.n_layers=1", "train.device=cpu"]
    good = call(*small, "--json", "new/list.json")
    assert good.exit_code == 0 and " 0 fail, " in good.output and json.loads((tmp_path / "new/list.json").read_text())["verdict"] in (PASS, WARN)
    assert call(*small, "schedule.warmup=9", "train.length=4 steps").exit_code == 1
    assert isinstance(call("--preset", "6b").exception, ConfigError)


def test_the_script_calls_the_command(monkeypatch):
    called = []
    monkeypatch.setattr("hsmoe.cli.main", lambda: called.append(sys.argv[1:]))
    monkeypatch.setattr(sys, "argv", ["preflight.py", "--preset", "5b"])
    runpy.run_path(str(ROOT / "scripts/preflight.py"))
    assert called == [["preflight", "--preset", "5b"]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")
def test_the_product_is_refused_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checks, record = preflight("5b", ["model.n_layers=1"])
    assert by_item(checks)["GPUs"] == (FAIL, "the target is 4 × NVIDIA B300, and this machine has none") and record["verdict"] == FAIL
    assert by_item(checks, "dry run")["two steps"] == (NONE, "not tried, since hardware, GPUs failed")
    let = CliRunner().invoke(app, ["preflight", "--preset", "5b", "--json", "a.json", "--allow-any-hardware", "model.n_layers=1", "parallel.dp=4", "schedule.warmup=5000"])
    rows = {(c["part"], c["item"]): c for c in json.loads(Path("a.json").read_text())["checks"]}
    assert rows["hardware", "GPUs"]["verdict"] == WARN and rows["model", "length"]["verdict"] == FAIL and let.exit_code == 1
