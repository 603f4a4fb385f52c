# Gateway, scheduler, billing and the command line: no torch. Build from the top of the checkout:
#   docker build -f deploy/docker/service.Dockerfile -t pdgate-service .
FROM python:3.11.13-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY requirements/service.txt requirements/service.txt
RUN python -m venv /opt/pdgate && /opt/pdgate/bin/pip install --no-deps -r requirements/service.txt
COPY . .
RUN /opt/pdgate/bin/pip install --no-deps .

FROM python:3.11.13-slim-bookworm
RUN useradd --system --uid 10001 --create-home pdgate \
    && install -d -o pdgate /var/lib/pdgate /models
COPY --from=build /opt/pdgate /opt/pdgate
ENV PATH=/opt/pdgate/bin:$PATH PYTHONUNBUFFERED=1
USER 10001
WORKDIR /var/lib/pdgate
CMD ["pdgate", "--help"]
