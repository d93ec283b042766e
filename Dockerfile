# mmrl in a container. For CPUs, which is what the digits world needs:
#   docker build -t mmrl .
#   docker run --rm -v "$PWD/runs:/work/runs" mmrl train digits/flow_grpo run=runs/first
# For NVIDIA GPUs (the driver of the host must know CUDA 13; torch's wheel brings the rest):
#   docker build -t mmrl:cuda --build-arg TORCH_INDEX=https://pypi.org/simple .
#   docker run --rm --gpus all --shm-size 8g -v "$PWD/runs:/work/runs" mmrl:cuda doctor
ARG PYTHON=3.12
FROM python:${PYTHON}-slim AS build
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY --from=build /wheels /wheels
# torch first and from its own index: the other libraries then find it and bring no second one
# no versions of torch here: the wheel says which fit
# hadolint ignore=DL3013
RUN pip install --no-cache-dir torch torchvision --index-url "${TORCH_INDEX}" \
    && pip install --no-cache-dir /wheels/*.whl \
    && rm -r /wheels \
    && useradd --create-home --uid 1000 mmrl \
    && install --directory --owner mmrl --group mmrl /work /work/runs
USER 1000
WORKDIR /work
ENV MMRL_CACHE=/home/mmrl/.cache/mmrl PYTHONUNBUFFERED=1
ENTRYPOINT ["mmrl"]
CMD ["--help"]
