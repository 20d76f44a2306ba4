"""Rate of preparation per core beside `tokenizers` alone: python scripts/tokenise_rate.py TOKENIZER TEXT.jsonl

Both encode the same texts. `tokenizers` alone has them in memory already, on one thread; preparation reads lines, makes text of them, drops duplicates and writes shards, with one worker.
The worker's core counts as one; beside it stands what the reading process takes of another."""
import json, os, resource, sys, tempfile, time
os.environ["TOKENIZERS_PARALLELISM"] = "false"
from pathlib import Path
import numpy as np
from hsmoe.data.corpus import _Encoding
from hsmoe.data.sources import list_files
from hsmoe.data.tokenizer import load_tokenizer
from hsmoe.data.workers import Pool, portions


def spent():
    return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


def main(tokenizer, path):
    tok = load_tokenizer(tokenizer)
    texts = [json.loads(line)["text"] for line in open(path, encoding="utf-8")]
    mb = sum(len(t.encode()) for t in texts) / 1e6
    tok.backend.encode_batch_fast(texts[:50])
    clock, cpu = time.perf_counter(), spent()
    for i in range(0, len(texts), 256): tok.backend.encode_batch_fast(texts[i:i + 256], add_special_tokens=False)
    alone = mb / (time.perf_counter() - clock), mb / (spent() - cpu)
    with tempfile.TemporaryDirectory() as folder:
        tok.save(folder)
        pool = Pool(1, folder, tok, "hash", 0.05, np.dtype("<u4"))
        work, files = _Encoding(Path(folder), "uint32", 1 << 28, {}, None), list_files(path)
        Path(folder, "first.txt").write_text("text")
        list(pool.encoded(portions(list_files(f"{folder}/first.txt"))))          # the worker has loaded its tokenizer
        clock, cpu = time.perf_counter(), spent()
        for p, e in pool.encoded(portions(files)): work.take(p, e)
        work.close(); wall = time.perf_counter() - clock
        own = spent() - cpu
        pool.__exit__()
    print(f"{mb:.1f} MB, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"tokenizers alone:   {alone[0]:.2f} MB/s, {alone[1]:.2f} MB for a second of processor time")
    print(f"with one worker:    {mb / wall:.2f} MB/s ({mb / wall / alone[0]:.0%}); the reading process takes {own / wall:.1%} of a second core")


if __name__ == "__main__": main(*sys.argv[1:])
