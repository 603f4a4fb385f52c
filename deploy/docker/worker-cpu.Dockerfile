# A worker with the real SGLang on CPU, and the two small models it can serve (about 4 GB).
#   docker build -f deploy/docker/worker-cpu.Dockerfile -t pdgate-worker-cpu .
FROM python:3.11.13-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY requirements requirements
RUN python -m venv /opt/engine \
    && /opt/engine/bin/pip install --extra-index-url https://download.pytorch.org/whl/cpu -r requirements/engine-cpu.txt \
    && /opt/engine/bin/pip install --no-deps -r requirements/engine-cpu-nodeps.txt
RUN python -m venv /opt/pdgate && /opt/pdgate/bin/pip install --no-deps -r requirements/base.txt
COPY . .
RUN /opt/pdgate/bin/pip install --no-deps . && /opt/engine/bin/pip install --no-deps .

FROM python:3.11.13-slim-bookworm
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libibverbs1 libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --create-home pdgate \
    && install -d -o pdgate /var/lib/pdgate /models
COPY --from=build /opt/engine /opt/engine
COPY --from=build /opt/pdgate /opt/pdgate
ENV PATH=/opt/engine/bin:/opt/pdgate/bin:$PATH PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 \
    PDGATE_ENGINE_DIR=/opt/engine PDGATE_MODELS_DIR=/models PDGATE_DATA=/var/lib/pdgate
USER 10001
WORKDIR /var/lib/pdgate
RUN pdgate engine install
CMD ["python", "-m", "workers"]
