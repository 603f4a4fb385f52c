# A worker with SGLang on CUDA. Not built or run in this project's CI: no GPU is at hand there.
#   docker build -f deploy/docker/worker-gpu.Dockerfile -t pdgate-worker-gpu .
FROM lmsysorg/sglang:v0.5.23-cu130
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
WORKDIR /src
COPY . .
RUN python3 -m pip install -r requirements/engine-gpu.in \
    && python3 -m pip install --no-deps . \
    && useradd --system --uid 10001 --create-home pdgate \
    && install -d -o pdgate /var/lib/pdgate /models
USER 10001
WORKDIR /var/lib/pdgate
CMD ["python3", "-m", "workers"]
