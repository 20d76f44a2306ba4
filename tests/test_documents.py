"""Attention that stays within the documents of a pack, from the configuration to a run that is read back."""
import json
from pathlib import Path

import pytest
import torch

from hsmoe.config import load_config
from hsmoe.data.corpus import Corpus, prepare_corpus
from hsmoe.evaluate import evaluate_run
from hsmoe.model.flash import Documents
from hsmoe.model.hybrid import HybridSparseMoEModel
from hsmoe.train.loop import corpus_options, load_run, run_training


def brute(tokens, begin_id):
    begin, end, S = [], [], len(tokens)
    for i in range(S):
        begin.append(max([j for j in range(i + 1) if tokens[j] == begin_id], default=0))
        end.append(min([j for j in range(i + 1, S) if tokens[j] == begin_id], default=S))
    return begin, end


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_beginnings_and_ends(share):
    tokens_BS = (torch.rand(5, 23) >= share).long()
    docs = Documents.of(tokens_BS, 0)
    for row, begin, end in zip(tokens_BS.tolist(), docs.begin_BS.tolist(), docs.end_BS.tolist()): assert (begin, end) == brute(row, 0)
    hidden = docs.hidden(4, 9, 23)
    for b in range(5):
        for i in range(4, 9): assert hidden[b, i - 4].tolist() == [j < docs.begin_BS[b, i] for j in range(23)]


@pytest.mark.parametrize("rope", [True, False])
def test_a_pack_gives_what_its_documents_give(rope):
    "Loss and every gradient, in float64, of three documents in one sequence and of the same three alone"
    torch.manual_seed(0)
    model = HybridSparseMoEModel(2, 32, 2, 4, 2, 2, vocab_size=29, max_seq_len=40, expert_inner=16, dense_inner=16, max_depth=1, rope=rope).double()
    model.compute_dtype, found = torch.float64, []
    texts = [[1, *torch.randint(2, 29, (n,)).tolist()] for n in (9, 4, 16)]
    weight = torch.randn(32, dtype=torch.float64)
    for batches, model.document_begin in (([sum(texts, [])], 1), (texts, None), ([sum(texts, [])], None)):
        model.zero_grad()
        total = sum((model(torch.tensor([b]))[0].hidden.square() * weight).sum() for b in batches)
        total.backward()
        found.append([total.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    packed, alone, mixed = found
    for a, b in zip(packed, alone): assert (a - b).norm() <= (1e-5 if rope else 1e-12) * (b.norm() + 1)      # the table of angles is fp32
    assert len(packed) > 20
    assert not torch.allclose(mixed[0], alone[0], rtol=1e-3)


def test_a_run_with_the_switch_is_read_back_with_it(tmp_path, small_overrides):
    losses, lines = {}, [line for path in sorted(Path(json.__file__).parent.glob("*.py")) for line in path.read_text(encoding="utf-8").splitlines() if len(line) > 20]
    (tmp_path / "short.jsonl").write_text("".join(json.dumps(dict(text="\n".join(lines[i:i + 3]))) + "\n" for i in range(len(lines))), encoding="utf-8")
    small_corpus, small_overrides = tmp_path / "corpus", [*small_overrides, f"data.sources={json.dumps([str(tmp_path / 'short.jsonl')])}"]
    prepare_corpus([str(tmp_path / "short.jsonl")], small_corpus, **corpus_options(load_config("tiny", small_overrides)))
    for on in (False, True):
        run_dir = run_training("tiny", [*small_overrides, "train.length=4 steps", f"data.document_mask={str(on).lower()}"], run_dir=tmp_path / f"run {on}", corpus_dir=small_corpus)
        report, (model, _) = json.loads((run_dir / "report.json").read_text()), load_run(run_dir)
        assert model.document_begin == (Corpus.open(small_corpus).manifest["tokenizer"]["bos_id"] if on else None)
        losses[on] = [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
        assert evaluate_run(run_dir, 2048)["val_loss"] == report["val_loss"]
    assert losses[False] != losses[True]
