# worker-node: generates rollouts for a coordinator; dials out only.
# Build from the root of the checkout: docker build -t worker-node -f docker/worker-node.Dockerfile .
ARG BASE=python:3.11-slim-bookworm

# hadolint ignore=DL3006
FROM ${BASE} AS build
# For a GPU: --build-arg CONSTRAINT=/dev/null takes the newest torch in range, a CUDA build.
ARG CONSTRAINT=requirements/cpu.txt
RUN python3 -m venv /opt/venv
WORKDIR /src
# What farflung needs is a layer of its own, built again only when these files change.
COPY pyproject.toml README.md LICENSE ./
COPY requirements requirements
RUN touch farflung.py && /opt/venv/bin/pip install --no-cache-dir -c "${CONSTRAINT}" '.[worker]'
COPY . .
RUN /opt/venv/bin/pip install --no-cache-dir --no-deps --force-reinstall .

# hadolint ignore=DL3006
FROM ${BASE}
# The node's key and its unacknowledged rollouts live in HOME: keep the volume, a lost key is a new node.
RUN useradd --system --uid 10001 --home-dir /data --shell /usr/sbin/nologin farflung \
    && install -d -o farflung -g farflung -m 700 /data
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH HOME=/data PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001
WORKDIR /data
VOLUME /data
# A worker serves nothing that could be asked for its health: it ends when it cannot go on.
HEALTHCHECK NONE
# docker run -v node:/data worker-node --coordinator URL
ENTRYPOINT ["farflung", "worker"]
