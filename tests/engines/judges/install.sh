#!/bin/bash
# Makes FOLDER, an environment with vLLM for CPUs, and in it the Python code of the newest vLLM and SGLang; 3 to 8 minutes.
# install.sh PYTHON FOLDER
set -e
here=$(dirname "$(realpath "$0")")
VLLM=0.33.0 SGLANG=0.5.23
"$1" -m venv "$2"
cd "$2"
bin/python -m pip install --quiet --constraint "$here/../../../constraints.txt" --requirement "$here/requirements.txt"
# PyPI's builds of these are for CUDA. Of torchvision vLLM needs the transforms alone, which are Python.
bin/python -m pip uninstall --quiet --yes torchaudio torchcodec
site=$(bin/python -c "import site; print(site.getsitepackages()[0])")
: > "$site/torchvision/_meta_registrations.py"
bin/python -m pip download --quiet --no-deps --dest wheels "vllm==$VLLM" "sglang==$SGLANG"
bin/python -m zipfile -e wheels/sglang-*.whl "sglang-$SGLANG"
bin/python -m zipfile -e wheels/vllm-*.whl "vllm-$VLLM"
rm -r wheels
# The libraries of the build for CPUs, and its mark, by which vLLM knows its platform.
find "vllm-$VLLM" -name "*.so" -delete
cp "$site"/vllm/*.so "vllm-$VLLM/vllm/"
sed -i "s/^Version: .*/Version: $VLLM+cpu/" "vllm-$VLLM/vllm-$VLLM.dist-info/METADATA"
