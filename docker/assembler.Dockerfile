# The assembler: CPU only, no torch and no transformers in it.
# Build from the repository's root: docker build --file docker/assembler.Dockerfile --tag hermes-assembler .
FROM python:3.11.14-slim-bookworm AS build
WORKDIR /src
RUN python -m venv /opt/hermes
ENV PATH=/opt/hermes/bin:$PATH
COPY LICENSE README.md constraints.txt pyproject.toml ./
COPY assembler assembler
COPY executor executor
COPY shared shared
RUN pip install --no-cache-dir --constraint constraints.txt '.[assembler]'

FROM python:3.11.14-slim-bookworm
RUN useradd --system --uid 10001 --create-home hermes \
    && install --directory --owner hermes /var/cache/hermes /var/cache/hermes-assembly
COPY --from=build /opt/hermes /opt/hermes
ENV PATH=/opt/hermes/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HERMES_CACHE=/var/cache/hermes
WORKDIR /var/cache/hermes
USER 10001
EXPOSE 50051 9101
# Assemble works; whether an executor is reachable too is the health name hermes.v1.Assembler.Generate.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["hermes", "health", "hermes.v1.Assembler"]
# Listens on loopback until HERMES_ASSEMBLER_HOST says otherwise, with TLS files or HERMES_ASSEMBLER_INSECURE=true.
ENTRYPOINT ["hermes-assembler"]
