"""A folder and a configuration for TensorRT-LLM, from a run or an exported model (SPEC R-03). UNRUN: TensorRT-LLM has not been at hand, on no GPU; see below for what has been tested.

`python scripts/trtllm_build.py RUN_OR_EXPORT OUT` writes OUT and prints the command that serves it; `--start` starts it too, where `trtllm-serve` is installed.

TensorRT-LLM has no implementation of this architecture. Its AutoDeploy backend (documented as beta) takes Hugging Face models instead: it traces them with `torch.export` on tensors without
storage, puts paged attention in place of the traced one, compiles, and serves with in-flight batching. What it needs and an export does not have:

- Experts in one operation. `modeling_hsmoe.py` splits rows by expert outside CUDA, with sizes that depend on the routing, which no trace can hold. OUT has the same file with a grouped product
  in one call (`torch._grouped_mm`, bf16, Hopper or newer).
- The values that serving changes (`hsmoe.serve.SERVED`): no rounding inside attention, one document a request; and bf16.
- `autodeploy.yaml`, in the names of TensorRT-LLM's `LlmArgs`: batch, lengths, GPUs, KV cache with block reuse (prefix caching), chunked prefill.

Tested without TensorRT-LLM (tests/test_serve.py): the files and their values; that the model in OUT passes `torch.export` with free batch and length on tensors without storage; and that its logits on a
CPU are those of the export in bf16. Not tested: AutoDeploy's own transforms, among them whether its pattern for attention is found between the roundings, sharding over several GPUs, and speed.
Packed exports (nvfp4, mxfp8) are refused: AutoDeploy reads ModelOpt's layout, and theirs is that of compressed-tensors.
"""
import argparse, json, os, shlex, shutil, sys
from pathlib import Path

import yaml

from hsmoe.config import ConfigError
from hsmoe.export import read_export, whole_folder
from hsmoe.notebook import USER_ERRORS
from hsmoe.serve import SERVED, served_folder

GROUPED = '''

def grouped_product(x_RK, w_ENK, count_E):
    "Row r of x times the matrix of its expert, in one operation whose sizes do not depend on the routing."
    return torch._grouped_mm(x_RK, w_ENK.transpose(1, 2), offs=count_E.cumsum(0).to(torch.int32))
'''


def autodeploy_options(about, gpus=1, batch=64, tokens=8192, context=None, memory=0.8, compiler="torch-cudagraph"):
    "The content of autodeploy.yaml for a model whose config.json is `about`"
    longest = about["max_position_embeddings"]
    context = context or longest
    if context > longest: raise ConfigError(f"--max-seq-len = {context} must not exceed the model's context of {longest}")
    return dict(runtime="trtllm", model_factory="AutoModelForCausalLM", world_size=gpus, compile_backend=compiler, max_batch_size=batch, max_num_tokens=max(tokens, batch), max_seq_len=context,
                enable_chunked_prefill=True, kv_cache_config=dict(enable_block_reuse=True, free_gpu_memory_fraction=memory))


def served_config(about):
    "config.json of OUT"
    if "quantization_config" in about: raise ConfigError("a packed export cannot be built: AutoDeploy reads ModelOpt's layout, not that of compressed-tensors; export with --to hf")
    odd = {n: about[n] for n in ("hidden_size", "moe_intermediate_size") if about[n] % 8}
    if odd or about.get("expert_modules"):
        raise ConfigError(f"grouped products need stacked experts whose sizes are multiples of 8, and this model has {odd or 'an expert a module'}")
    return {**about, **SERVED, "dtype": "bfloat16"}


def build(folder, out, options):
    "Write OUT from an exported folder; nothing is left where it fails"
    folder, about = Path(folder), read_export(folder)
    config = served_config(about)
    with whole_folder(out) as made:
        for path in folder.iterdir():
            if path.suffix == ".safetensors":
                try: os.link(path, made / path.name)
                except OSError: shutil.copyfile(path, made / path.name)
            elif path.is_file() and path.name != "README.md": shutil.copyfile(path, made / path.name)
        (made / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        with (made / "modeling_hsmoe.py").open("a", encoding="utf-8") as f: f.write(GROUPED)
        (made / "autodeploy.yaml").write_text(yaml.safe_dump(options, sort_keys=False), encoding="utf-8")


def serve_line(out, host="127.0.0.1", port=8000):
    "The documented command of the AutoDeploy backend"
    return ["trtllm-serve", str(out), "--backend", "_autodeploy", "--host", host, "--port", str(port), "--trust_remote_code", "--extra_llm_api_options", str(Path(out) / "autodeploy.yaml")]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="run or exported model")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--max-batch-size", type=int, default=64)
    parser.add_argument("--max-num-tokens", type=int, default=8192, help="tokens of a pass, of all requests together")
    parser.add_argument("--max-seq-len", type=int, help="default the model's context")
    parser.add_argument("--kv-memory", type=float, default=0.8, help="part of the free GPU memory for the KV cache")
    parser.add_argument("--compile-backend", default="torch-cudagraph", choices=["torch-simple", "torch-compile", "torch-cudagraph", "torch-opt"])
    parser.add_argument("--start", action="store_true", help="start trtllm-serve")
    args = parser.parse_args(arguments)
    folder = served_folder(args.model, say=print)
    options = autodeploy_options(read_export(folder), args.gpus, args.max_batch_size, args.max_num_tokens, args.max_seq_len, args.kv_memory, args.compile_backend)
    if args.start and not shutil.which("trtllm-serve"): raise ConfigError("trtllm-serve is not installed here; pip install tensorrt_llm on a machine with an NVIDIA GPU, or leave out --start")
    build(folder, args.out, options)
    line = serve_line(args.out)
    print(shlex.join(line), flush=True)
    if args.start: os.execvp(line[0], line)


if __name__ == "__main__":
    try: main()
    except USER_ERRORS as e:
        print(f"trtllm_build.py: {e}", file=sys.stderr)
        sys.exit(2)
