# relay: passes weights on and needs no trust; knows neither models nor torch.
# Build from the root of the checkout: docker build -t relay -f docker/relay.Dockerfile .
ARG BASE=python:3.11-slim-bookworm

# hadolint ignore=DL3006
FROM ${BASE} AS build
RUN python3 -m venv /opt/venv
WORKDIR /src
COPY . .
RUN /opt/venv/bin/pip install --no-cache-dir '.[relay]'

# hadolint ignore=DL3006
FROM ${BASE}
# The relay's key and its shards live in HOME; without the volume it starts empty and fills itself again.
RUN useradd --system --uid 10001 --home-dir /data --shell /usr/sbin/nologin farflung \
    && install -d -o farflung -g farflung -m 700 /data
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH HOME=/data PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001
WORKDIR /data
VOLUME /data
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=30s \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]
# docker run -v relay:/data -p 8000:8000 relay --upstream URL
ENTRYPOINT ["farflung", "relay", "--listen", "0.0.0.0:8000", "--dir", "/data/relay"]
