# Two images from one file, built in a checkout:
#   docker build --target cpu --tag millrace:cpu .
#   docker build --target cuda --tag millrace:cuda .    (docker run --gpus all …)
# The packages of JAX bring CUDA along, so the host needs only the driver.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS base
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1
WORKDIR /build
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY millrace ./millrace
# Runs and data go to /work, which is meant to be mounted.
RUN useradd --create-home --uid 1000 millrace \
    && mkdir /work \
    && chown millrace /work

FROM base AS cpu
RUN python -m pip install '.[images,export,tensorboard]' --constraint constraints.txt
USER 1000
WORKDIR /work
ENTRYPOINT ["millrace"]
CMD ["--help"]

FROM base AS cuda
# cuda12 for drivers below 580.
ARG CUDA_EXTRA=cuda
RUN python -m pip install ".[${CUDA_EXTRA},images,export,tensorboard]" --constraint constraints.txt
USER 1000
WORKDIR /work
ENTRYPOINT ["millrace"]
CMD ["--help"]
