"""Depths from causal language models (SPEC A-01, T-05): entropies against a direct computation, whatever the batches; documents apart; killed and resumed; and a run that asks its own model."""
import json, os, shutil, signal, subprocess, sys, time
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from conftest import ROOT, SMALL
import hsmoe.train.depths as module
from hsmoe.cli import app
from hsmoe.config import load_config
from hsmoe.data.corpus import Corpus, CorpusError, Shards, prepare_corpus
from hsmoe.model.hybrid import build_model
from hsmoe.mtp.depths import room_from_starts
from hsmoe.train.depths import bigram_estimator, estimate_depths, huggingface_estimator, model_estimator, open_run_depths, score_split, windows_of
from hsmoe.train.loop import Run, TrainingError
from hsmoe.train.telemetry import read_metrics, series

TEXTS = [f"Document {i}: " + " ".join(f"{(i * j) % 97} apples" for j in range(n)) + ".\n" for i, n in enumerate([1, 2, 3, 5, 8, 13, 20, 33, 50, 80] * 2)]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    (folder / "d.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    return prepare_corpus(folder / "d.jsonl", folder / "corpus", vocab_size=280, val="tail", shard_tokens=1000)


@pytest.fixture
def corpus(original, tmp_path):
    shutil.copytree(original.folder, tmp_path / "corpus")
    return Corpus.open(tmp_path / "corpus")


def all_of(shards): return shards.read(0, len(shards)).copy()


def checkpoint(folder, family, corpus):
    "A random model of a family, saved as transformers saves it, beside the corpus' tokenizer."
    transformers = pytest.importorskip("transformers")
    V, common = corpus.vocab_size + 5, dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64)
    ids = dict(vocab_size=V, bos_token_id=corpus.tokenizer.bos_id, eos_token_id=corpus.tokenizer.eos_id, pad_token_id=corpus.tokenizer.pad_id)
    config = {"gpt2": lambda: transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=64, **ids), "llama": lambda: transformers.LlamaConfig(**common, **ids),
              "gemma2": lambda: transformers.Gemma2Config(**common, head_dim=8, final_logit_softcapping=4.0, **ids), "granite": lambda: transformers.GraniteConfig(**common, logits_scaling=0.2, **ids)}[family]()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for p in model.parameters():
        if p.ndim > 1: p.data.normal_(0, 0.5)
    model.save_pretrained(folder)
    shutil.copy(corpus.folder / "tokenizer.json", folder)
    return model.eval()


def directly(model, ids, starts, context):
    "Entropies in bits by the plain definition: each window alone, whole logits, float64."
    out = np.empty(len(ids))
    for begin, scored, end in windows_of(starts, len(ids), context):
        with torch.no_grad(): logp = model(torch.from_numpy(ids[None, begin:end])).logits[0].double().log_softmax(-1)
        out[scored:end] = (-(logp.exp() * logp).sum(-1) / np.log(2)).numpy()[scored - begin:]
    return out


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "granite"])
def test_a_hugging_face_model_read_back_gives_the_entropies_of_the_definition(tmp_path, original, family):
    model = checkpoint(tmp_path / "hf", family, original)
    estimator = huggingface_estimator(tmp_path / "hf", original)
    assert estimator.context == 64 and estimator.identity["kind"] == "huggingface" and estimator.identity["name"] == "hf"
    split = original.split("train")
    ids = all_of(split.tokens).astype(np.int64)
    assert np.diff([*split.starts, len(ids)]).max() > 3 * 64, "no document is longer than the context"
    want = directly(model, ids, split.starts, 64)
    assert want.std() > 0.05
    found = [all_of(score_split(split, estimator, tmp_path / f"bits-{i}", batch_tokens=b, piece=p)) for i, (b, p) in enumerate([(1, 1 << 20), (64, 333), (1 << 14, 1 << 20)])]
    for bits in found: assert np.abs(bits - want).max() < 2e-4
    assert max(np.abs(a - found[0]).max() for a in found) < 1e-5                          # however it is cut


def test_a_corpus_gets_the_depths_of_a_model(tmp_path, corpus):
    checkpoint(tmp_path / "hf", "gpt2", corpus)
    before, fingerprint, tokens = all_of(corpus.split("train").depth), corpus.fingerprint, all_of(corpus.split("train").tokens)
    old = set(p.name for p in corpus.folder.iterdir())
    made = estimate_depths(corpus, huggingface_estimator(tmp_path / "hf", corpus), batch_tokens=2048)
    for name in ("train", "val"):
        s = made.split(name)
        h, room = all_of(s.depth), room_from_starts(s.starts, len(s.tokens))
        assert (h <= room).all() and ((h == 0) == (room == 0)).all()                       # no depth crosses a document's end
        assert s.mean_depth == pytest.approx(h.sum() / (room > 0).sum())
        assert s.depth.ends == s.tokens.ends
    assert made.split("train").mean_depth == pytest.approx(3, abs=0.05) and made.fingerprint != fingerprint
    assert (all_of(made.split("train").tokens) == tokens).all() and (all_of(made.split("train").depth) != before).mean() > 0.1
    Corpus.open(corpus.folder, verify=True)
    now = set(p.name for p in corpus.folder.iterdir())
    assert {n for n in old ^ now} == {n for n in old ^ now if ".depth" in n} and len(now) == len(old)
    again = huggingface_estimator(tmp_path / "hf", made)
    assert estimate_depths(made, again._replace(bits=None)).fingerprint == made.fingerprint   # has them already: nobody is asked
    back = estimate_depths(made, bigram_estimator(made))
    assert (all_of(back.split("train").depth) == before).all()


def test_documents_do_not_see_one_another(tmp_path, original):
    "With one document changed, the entropies of all others stay to the last bit."
    cfg = load_config("tiny", SMALL)
    torch.manual_seed(0)
    estimator = model_estimator(build_model(cfg), original.tokenizer.pad_id)
    split = original.split("train")
    ids = all_of(split.tokens)
    first = all_of(score_split(split, estimator, tmp_path / "a", batch_tokens=1))           # rows of their own, so that rounding is the same as well
    a, b = int(split.starts[6]), int(split.starts[7])
    changed = ids.copy(); changed[a + 1:b - 1] = changed[a + 1:b - 1][::-1]
    (tmp_path / "tokens").write_bytes(changed.tobytes())
    second = all_of(score_split(split._replace(tokens=Shards([tmp_path / "tokens"], [len(ids)], ids.dtype)), estimator, tmp_path / "b", batch_tokens=1))
    same = first == second
    assert same[:a].all() and same[b:].all() and not same[a + 2:b - 1].all()


def test_a_model_of_other_ids_is_refused_in_a_sentence(tmp_path, corpus, monkeypatch):
    for empty in (tmp_path / "none", tmp_path):
        with pytest.raises(CorpusError, match="neither the config.yaml of a run nor the config.json"): huggingface_estimator(empty, corpus)
    folder = tmp_path / "hf"; folder.mkdir(); (folder / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CorpusError, match="pip install transformers"): huggingface_estimator(folder, corpus)
    monkeypatch.undo()
    checkpoint(folder, "gpt2", corpus)
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CorpusError, match="has no tokenizer.json"): huggingface_estimator(folder, corpus)
    other = json.loads(text); vocab = other["model"]["vocab"]; a, b = [k for k, v in vocab.items() if v in (270, 271)]; vocab[a], vocab[b] = vocab[b], vocab[a]
    (folder / "tokenizer.json").write_text(json.dumps(other))
    with pytest.raises(CorpusError, match="is not that of .*id 270 is"): huggingface_estimator(folder, corpus)
    merges = json.loads(text); merges["model"]["merges"] = []
    (folder / "tokenizer.json").write_text(json.dumps(merges))
    with pytest.raises(CorpusError, match="the same text has other ids"): huggingface_estimator(folder, corpus)
    (folder / "tokenizer.json").write_text(text)
    config = json.loads((folder / "config.json").read_text()) | dict(bos_token_id=7)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CorpusError, match=f"begin with id 7 there and with {corpus.tokenizer.bos_id} here"): huggingface_estimator(folder, corpus)
    monkeypatch.setattr(module, "_logits_of", lambda model: lambda x_TD: 2 * model.get_output_embeddings()(x_TD))
    (folder / "config.json").write_text(json.dumps(config | dict(bos_token_id=corpus.tokenizer.bos_id)))
    with pytest.raises(CorpusError, match="cannot be asked in parts"): huggingface_estimator(folder, corpus)
    monkeypatch.undo()
    (folder / "model.safetensors").write_bytes(b"no")
    (folder / "config.json").write_text(json.dumps(config | dict(bos_token_id=corpus.tokenizer.bos_id)))
    with pytest.raises(CorpusError, match="cannot be read as a causal language model"): huggingface_estimator(folder, corpus)


def asked(corpus, said=None, pause=0.0):
    "Depths by a slow estimator in small pieces; how often it was asked, each time with a byte into `said`."
    real, calls = bigram_estimator(corpus)._replace(context=64), []
    def bits(ids):
        calls.append(1); time.sleep(pause)
        if said is not None: os.write(said, b"x")
        return real.bits(ids)
    estimate_depths(corpus, real._replace(bits=bits), target=2.0, piece=100, batch_tokens=128)
    return len(calls)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_in_the_middle_it_goes_on_where_it_was(tmp_path, original):
    "SIGKILL; the corpus is what it was; then the same call ends with the same bytes as one that was left alone, and asks for no finished piece again."
    for name in ("killed", "whole"): shutil.copytree(original.folder, tmp_path / name)
    listen, said = os.pipe()
    if not (child := os.fork()):
        try: asked(Corpus.open(tmp_path / "killed"), said, 0.05)
        finally: os._exit(0)
    for _ in range(9): assert os.read(listen, 1) == b"x"
    os.kill(child, signal.SIGKILL); os.waitpid(child, 0); os.close(listen); os.close(said)
    assert Corpus.open(tmp_path / "killed", verify=True).fingerprint == original.fingerprint and list((tmp_path / "killed").glob(".entropies-*"))
    whole, killed = asked(Corpus.open(tmp_path / "whole")), asked(Corpus.open(tmp_path / "killed"))
    assert whole > 20 and killed <= whole - 6, (whole, killed)
    assert {p.name: p.read_bytes() for p in (tmp_path / "killed").iterdir()} == {p.name: p.read_bytes() for p in (tmp_path / "whole").iterdir()}


def test_a_full_disk_leaves_the_corpus_as_it_was(corpus, monkeypatch):
    def full(*_, **__): raise OSError(28, "No space left on device")
    monkeypatch.setattr(module, "write_depth_files", full)
    with pytest.raises(CorpusError, match="cannot be given new depths: No space left on device"): estimate_depths(corpus, bigram_estimator(corpus), target=2.0)
    assert Corpus.open(corpus.folder, verify=True).fingerprint == corpus.fingerprint


class Killed(Exception): pass


def test_a_run_asks_its_own_model_and_a_killed_one_is_the_same(tmp_path, corpus, monkeypatch):
    "Killed right after a checkpoint and between new depths and the next checkpoint; resumed, it is the undisturbed run to the last bit, and other depths than the corpus' were used."
    cfg = load_config("tiny", SMALL + ["model.vocab_size=280", "model.n_layers=1", "train.micro_batch_sequences=4", f"data.sources={json.dumps(corpus.manifest['request']['sources'])}", "data.split=tail",
                                       "train.length=9 steps", "data.recompute_depths_every=3", "train.checkpoint_every=2", "train.validate_every=3", "train.keep_best=true"])
    new = lambda name, **kw: Run(cfg, tmp_path / name, corpus.folder, **kw)
    whole = new("whole"); report = whole.train()
    made = [(r["step"], r["depths"]) for r in read_metrics(tmp_path / "whole") if "depths" in r]
    assert [n for n, _ in made] == [3, 6] and all(abs(d["mean_depth"] - 3) < 0.1 and not d["reused"] for _, d in made)
    killed, save = new("killed"), Run.save
    def die_after(step):
        def f(self):
            save(self)
            if self.state.step == step: raise Killed
        return f
    for step, resume in ((4, False), (6, True)):
        monkeypatch.setattr(Run, "save", die_after(step))
        if resume: killed = new("killed", resume=True); assert killed.state.step == 4 and killed.state.depths == 3
        with pytest.raises(Killed): killed.train()
    monkeypatch.setattr(Run, "save", save)
    shutil.rmtree(tmp_path / "killed" / "checkpoints" / "step-6")                           # as if killed between the depths of step 6 and its checkpoint
    again = new("killed", resume=True)
    assert again.state.step == 4 and again.state.depths == 3
    assert again.train()["val_loss"] == report["val_loss"]
    assert [r["depths"]["reused"] for r in read_metrics(tmp_path / "killed") if "depths" in r] == [False, True]
    for key in ("loss", "mean_depth"): assert series(read_metrics(tmp_path / "killed"), key) == series(read_metrics(tmp_path / "whole"), key)
    for (name, a), b in zip(whole.state.model.state_dict().items(), again.state.model.state_dict().values()): assert torch.equal(a, b), name
    assert series(read_metrics(tmp_path / "whole"), "loss")[1][:3] != series(read_metrics(tmp_path / "whole"), "loss")[1][3:6]
    depths = open_run_depths(tmp_path / "whole" / "depths" / "step-6", whole.train_data.split)
    assert (all_of(depths.depth) != all_of(corpus.split("train").depth)).mean() > 0.05
    assert (all_of(whole.train_data.split.depth) == all_of(depths.depth)).all()
    path = Path(depths.depth.paths[0]); path.write_bytes(b"\x07" + path.read_bytes()[1:])
    (tmp_path / "whole" / "report.json").unlink()
    with pytest.raises(TrainingError, match="is damaged, its SHA-256 differs"): new("whole", resume=True)


def test_the_command(tmp_path, corpus):
    runner = CliRunner()
    out = runner.invoke(app, ["depths", str(corpus.folder), "--from", "bigram", "--target", "2"])
    assert out.exit_code == 0 and "train: mean depth 2.0" in out.output and Corpus.open(corpus.folder).fingerprint in out.output
    result = runner.invoke(app, ["depths", str(corpus.folder), "--from", str(tmp_path / "nowhere")])
    assert isinstance(result.exception, CorpusError)


@pytest.mark.slow
def test_two_processes_make_the_depths_of_one_and_one_goes_on_with_them(tmp_path, corpus):
    "Experts spread over two processes, which take turns in the batches; resumed by two it is the same run, and by one it goes on with the same depths."
    overrides = SMALL + ["model.vocab_size=280", "model.n_layers=1", f"data.sources={json.dumps(corpus.manifest['request']['sources'])}", "data.split=tail", "data.val_fraction=null", "train.length=4 steps", "data.recompute_depths_every=2",
                         "train.checkpoint_every=2", "train.validate_every=4", "train.keep_checkpoints=5", "quant.weight_format=null", "quant.activation_format=null", "quant.attention_format=null",
                         "optim.states=fp32", "train.dtype=float32", "router.balance=bias"]
    def train(world, *args):
        how = [] if world == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        result = subprocess.run([sys.executable, *how, "-m", "hsmoe.cli", "train", *map(str, args)], cwd=tmp_path, capture_output=True, text=True, timeout=300,
                                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"})
        assert result.returncode == 0, result.stdout[-1000:] + result.stderr[-3000:]
    for world in (1, 2): train(world, "--corpus", corpus.folder, "--run-dir", tmp_path / f"run-{world}", *overrides, f"parallel.ep={world}", f"parallel.dp={world}")
    one, two = (np.fromfile(tmp_path / f"run-{w}" / "depths" / "step-2" / "train-00000.depth.bin", np.uint8) for w in (1, 2))
    assert (one == two).mean() > 0.99 and (one != all_of(corpus.split("train").depth)[:len(one)]).mean() > 0.05
    losses = series(read_metrics(tmp_path / "run-2"), "loss")
    assert losses[1] == pytest.approx(series(read_metrics(tmp_path / "run-1"), "loss")[1], rel=1e-3)
    for world in (2, 1):
        run = tmp_path / f"resumed-{world}"
        shutil.copytree(tmp_path / "run-2", run)
        shutil.rmtree(run / "checkpoints" / "step-4"); (run / "report.json").unlink()
        config = json.loads((run / "config.json").read_text()); config["parallel"] |= dict(ep=world, dp=world)
        for name in ("config.json", "config.yaml"): (run / name).write_text(json.dumps(config))
        train(world, "--resume", run)
        again = series(read_metrics(run), "loss")
        assert again == losses if world == 2 else again[1] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_model_says_what_it_says_on_a_cpu(tmp_path, original):
    "A Hugging Face model in bf16, and a run that recomputes on the GPU: entropies near those of fp32 on a CPU, and the mean depth is the multiplier."
    checkpoint(tmp_path / "hf", "llama", original)
    split = original.split("train")
    cpu, gpu = (all_of(score_split(split, huggingface_estimator(tmp_path / "hf", original, device), tmp_path / device)) for device in ("cpu", "cuda"))
    assert np.abs(cpu - gpu).mean() < 0.05
    cfg = load_config("tiny", SMALL + ["model.vocab_size=280", "model.n_layers=1", f"data.sources={json.dumps(original.manifest['request']['sources'])}", "data.split=tail", "data.val_fraction=null",
                                       "train.device=cuda", "train.dtype=bfloat16", "train.length=4 steps", "data.recompute_depths_every=2"])
    run = Run(cfg, tmp_path / "run", original.folder)
    run.train()
    (made,) = [r["depths"] for r in read_metrics(tmp_path / "run") if "depths" in r]
    assert abs(made["mean_depth"] - 3) < 0.2 and not made["reused"]
