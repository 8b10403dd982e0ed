# fp4convert in a container, for CI jobs and clusters:
#   docker build -t fp4convert .
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" fp4convert quantize ./Llama-3.1-8B --format nvfp4
# With GPUs, whose driver comes from the host (NVIDIA container toolkit: docker run --gpus all):
#   docker build -t fp4convert:cuda --build-arg EXTRAS=cuda12 .
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM python:${PYTHON}-slim
# Extras of pyproject.toml, separated by commas: cuda12, cuda13, gguf, calibrate, ray
ARG EXTRAS=""
# For the extra calibrate alone, which brings torch: torch without CUDA is there, gigabytes smaller
ARG INDEX=https://download.pytorch.org/whl/cpu
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --extra-index-url "${INDEX}" "$(echo /wheels/fp4convert-*.whl)${EXTRAS:+[${EXTRAS}]}" && rm -r /wheels
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Any user may run it, and what is cached goes where all may write
ENV HF_HOME=/tmp/huggingface XDG_CACHE_HOME=/tmp/cache
WORKDIR /work
ENTRYPOINT ["fp4convert"]
CMD ["--help"]
