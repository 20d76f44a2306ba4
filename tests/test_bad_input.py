"""Each mistake a new user makes: one sentence, exit code not 0, nothing half-written."""
import json, shutil
from pathlib import Path

import pytest

from conftest import SMALL


def complaint(result, *parts):
    "The one sentence of a failed command."
    assert result.returncode != 0, result.stdout
    lines = [l for l in result.stderr.splitlines() if l.strip()]
    assert len(lines) == 1 and "Traceback" not in result.stderr, result.stderr
    for part in parts: assert part in lines[0], lines[0]


def leftovers(folder: Path, ignore=()):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and not any(part in ignore for part in p.parts))


def test_missing_path(hsmoe_cli, tmp_path):
    complaint(hsmoe_cli("train", "--source", "no/such/folder", *SMALL), "no/such/folder", "does not exist")
    assert leftovers(tmp_path) == []


def test_empty_corpus(hsmoe_cli, tmp_path):
    (tmp_path / "empty").mkdir()
    complaint(hsmoe_cli("prepare", "--source", "empty", *SMALL), "empty")
    assert leftovers(tmp_path) == []


def test_file_that_is_not_utf8(hsmoe_cli, tmp_path):
    (tmp_path / "latin.txt").write_bytes("schön".encode("latin-1") * 50)
    complaint(hsmoe_cli("prepare", "--source", "latin.txt", *SMALL), "latin.txt", "UTF-8")
    assert leftovers(tmp_path) == ["latin.txt"]


def test_corpus_shorter_than_a_sequence(hsmoe_cli, tmp_path):
    (tmp_path / "a.txt").write_text("short"); (tmp_path / "b.txt").write_text("also short")
    complaint(hsmoe_cli("prepare", "--source", "a.txt", "--source", "b.txt", *SMALL), "64")
    assert leftovers(tmp_path) == ["a.txt", "b.txt"]


def test_broken_jsonl_line(hsmoe_cli, tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps(dict(text="fine")) + "\n{broken\n")
    complaint(hsmoe_cli("prepare", "--source", "x.jsonl", *SMALL), "x.jsonl", "2")
    assert leftovers(tmp_path) == ["x.jsonl"]


@pytest.mark.parametrize("override, parts", [
    ("optim.peek_lr=1e-3", ("optim.peek_lr", "optim.peak_lr")),
    ("model.n_layers=many", ("model.n_layers", "integer")),
    ("model.n_heads=5", ("model.n_heads", "model.d_model")),
    ("parallel.ep=3", ("parallel.ep",)),
    ("quant.weight_format=int8:1x256", ("int8:1x256", "compute copy")),
    ("quant.sites={probs: 'e4m3'}", ("quant",)),
    ("train.length=forever", ("train.length", "N minutes")),
    ("train.batch_sequences", ("key.path=value",)),
])
def test_override(hsmoe_cli, tmp_path, override, parts):
    complaint(hsmoe_cli("train", *SMALL, override, "train.dtype=bfloat16"), *parts)
    assert leftovers(tmp_path) == []


def test_resume_with_another_configuration(hsmoe_cli, tmp_path, small_corpus, small_overrides):
    common = [*small_overrides, "train.length=6 steps"]
    result = hsmoe_cli("train", "--corpus", small_corpus, "--run-dir", "run", *common)
    assert result.returncode == 0, result.stderr
    before = {p: (tmp_path / p).read_bytes() for p in leftovers(tmp_path)}
    complaint(hsmoe_cli("train", "--corpus", small_corpus, "--resume", "run", *common, "optim.peak_lr=1e-3"), "optim.peak_lr", "another configuration")
    complaint(hsmoe_cli("train", "--corpus", small_corpus, "--run-dir", "run", *common), "already holds a run")
    complaint(hsmoe_cli("train", "--resume", "elsewhere"), "elsewhere", "holds no run")
    assert {p: (tmp_path / p).read_bytes() for p in leftovers(tmp_path)} == before


def test_damaged_corpus_and_checkpoint(hsmoe_cli, tmp_path, small_corpus, small_overrides):
    shutil.copytree(small_corpus, tmp_path / "corpus")
    shard = next((tmp_path / "corpus").glob("train*.tokens.bin"))
    shard.write_bytes(shard.read_bytes()[:-2])
    complaint(hsmoe_cli("train", "--corpus", "corpus", *small_overrides, "train.length=6 steps"), shard.name)
    assert not (tmp_path / "runs").exists()
    assert hsmoe_cli("train", "--corpus", small_corpus, "--run-dir", "run", *small_overrides, "train.length=6 steps").returncode == 0
    data = next((tmp_path / "run" / "checkpoints" / "step-6").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1] + bytes([data.read_bytes()[-1] ^ 1]))
    complaint(hsmoe_cli("eval", "run"), "damaged")


def test_run_folder_that_cannot_be_written(hsmoe_cli, tmp_path, small_corpus, small_overrides):
    (tmp_path / "file").write_text("in the way")
    complaint(hsmoe_cli("train", "--corpus", small_corpus, "--run-dir", "file/run", *small_overrides, "train.length=6 steps"), "file/run", "cannot be written")
    assert leftovers(tmp_path) == ["file"]


def test_no_run(hsmoe_cli):
    complaint(hsmoe_cli("eval", "nowhere"), "nowhere", "not a run folder")
    complaint(hsmoe_cli("generate", "nowhere"), "nowhere", "not a run folder")


def test_a_flipped_byte_in_a_shard(hsmoe_cli, tmp_path, small_corpus, small_overrides):
    shutil.copytree(small_corpus, tmp_path / "corpus")
    shard = next((tmp_path / "corpus").glob("train*.tokens.bin"))
    data = bytearray(shard.read_bytes()); data[100] ^= 1; shard.write_bytes(data)
    complaint(hsmoe_cli("train", "--corpus", "corpus", *small_overrides, "train.length=6 steps"), shard.name, "SHA-256")
    assert not (tmp_path / "runs").exists()


def test_what_a_finished_run_refuses(hsmoe_cli, tmp_path, small_corpus, small_overrides):
    assert hsmoe_cli("train", "--corpus", small_corpus, "--run-dir", "run", *small_overrides, "train.length=6 steps").returncode == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert hsmoe_cli("train", "--corpus", small_corpus, "--resume", "run").returncode == 0
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == lines
    complaint(hsmoe_cli("train", "--corpus", small_corpus, "--resume", "run", "--preset", "shakespeare"), "another configuration")
    complaint(hsmoe_cli("train", "--corpus", small_corpus, "--resume", "run", "--minutes", "1"), "keeps the length")
    elsewhere = tmp_path / "other"
    elsewhere.mkdir()
    for i in range(30): (elsewhere / f"{i}.txt").write_text(f"another text, number {i}. " * 60)
    result = hsmoe_cli("prepare", "--source", "other", *SMALL, "train.length=6 steps")
    assert result.returncode == 0, result.stderr
    other = result.stdout.split()[-1]
    complaint(hsmoe_cli("train", "--corpus", other, "--resume", "run"), "fingerprint")
    record = json.loads((tmp_path / "run" / "corpus.json").read_text())
    (tmp_path / "run" / "corpus.json").write_text(json.dumps({**record, "path": str(tmp_path / other)}))
    complaint(hsmoe_cli("eval", "run"), "fingerprint")
    (tmp_path / "run" / "corpus.json").unlink()
    complaint(hsmoe_cli("eval", "run"), "corpus.json")
    assert hsmoe_cli("generate", "run", "--prompt", "def é", "--max-new-tokens", "5").returncode == 0


def test_one_text_file_is_enough(hsmoe_cli, tmp_path):
    (tmp_path / "one.txt").write_text("\n".join(f"line {i}: the quick brown fox counts to {i * i}" for i in range(3000)))
    result = hsmoe_cli("prepare", "--source", "one.txt", *SMALL)
    assert result.returncode == 0, result.stderr


def test_a_notebook_run_is_not_written_over(hsmoe_cli, tmp_path):
    from conftest import ROOT
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("name: x\n")
    (tmp_path / "run" / "train.ipynb").write_text("kept")
    (tmp_path / "some").mkdir()
    for i in range(30): (tmp_path / "some" / f"{i}.txt").write_text(f"a text, number {i}. " * 60)
    result = hsmoe_cli("run", ROOT / "nbs/runs/train.ipynb", "-p", "run_dir", "run", "-p", "source", "[some]", "-p", "overrides", json.dumps(SMALL))
    assert result.returncode == 2 and "already holds a run" in result.stderr
    assert not (tmp_path / "corpora").exists()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["config.yaml", "train.failed.ipynb", "train.ipynb"] and (tmp_path / "run" / "train.ipynb").read_text() == "kept"
    (tmp_path / "broken.ipynb").write_text("{")
    complaint(hsmoe_cli("run", "broken.ipynb"), "broken.ipynb", "not a notebook")
