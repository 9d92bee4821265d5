# coordinator: hands out tasks, verifies, trains, keeps the ledger and serves the dashboard.
# Build from the root of the checkout: docker build -t coordinator -f docker/coordinator.Dockerfile .
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
RUN touch farflung.py && /opt/venv/bin/pip install --no-cache-dir -c "${CONSTRAINT}" '.[coordinator]'
COPY . .
RUN /opt/venv/bin/pip install --no-cache-dir --no-deps --force-reinstall .

# hadolint ignore=DL3006
FROM ${BASE}
# The run key, the ledger and the store live in HOME: keep the volume, a lost key is a new run.
RUN useradd --system --uid 10001 --home-dir /data --shell /usr/sbin/nologin farflung \
    && install -d -o farflung -g farflung -m 700 /data
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH HOME=/data PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001
WORKDIR /data
VOLUME /data
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=120s \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]
# docker run -v run:/data -p 8000:8000 coordinator
ENTRYPOINT ["farflung", "coordinator", "--listen", "0.0.0.0:8000", "--init", "--dir", "/data/run"]
