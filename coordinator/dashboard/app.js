// Shows what /events sends. Everything from the server enters the page as text, never as markup.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const MEAN_OF = 10; // steps in the bold line of the reward chart
const byId = (id) => document.getElementById(id);
const set = (id, text) => { const node = byId(id); if (node.textContent !== text) node.textContent = text; };
const number = (value) => value.toLocaleString("en");
const percent = (value) => `${(100 * value).toFixed(1)}%`;

function bytes(count) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (count < 999.5) return `${unit === "B" || count >= 99.95 ? Math.round(count) : count.toFixed(1)} ${unit}`;
    count /= 1000;
  }
  return `${count.toFixed(1)} TB`;
}

function ago(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.round(seconds))} s`;
  return seconds < 3600 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

// ---- charts -------------------------------------------------------------------------------------------------------

function element(name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function ticks(low, high, wanted) { // round numbers from low to high
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough * 0.999);
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-6; value += step) found.push(value);
  return found;
}

function trailingMean(points, width) {
  return points.map(([x], i) => {
    const part = points.slice(Math.max(0, i + 1 - width), i + 1);
    return [x, part.reduce((sum, point) => sum + point[1], 0) / part.length];
  });
}

class Chart {
  constructor(id, { name, format, low, high, mean }) {
    Object.assign(this, { svg: byId(id), name, format, low, high, mean, points: [], hover: null });
    this.svg.addEventListener("pointermove", (event) => {
      this.hover = event.clientX - this.svg.getBoundingClientRect().left;
      this.draw();
    });
    this.svg.addEventListener("pointerleave", () => { this.hover = null; this.draw(); });
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  show(points) {
    if (JSON.stringify(points) === JSON.stringify(this.points)) return;
    this.points = points;
    this.draw();
  }

  draw() {
    const { width, height } = this.svg.getBoundingClientRect();
    const box = { left: 46, right: width - 14, top: 20, bottom: height - 24 };
    this.svg.replaceChildren();
    if (!this.points.length || width < 100) {
      this.svg.append(element("text", { x: box.left, y: height / 2 }, "nothing measured yet"));
      return;
    }
    const ys = this.points.map((point) => point[1]);
    const [low, high] = [Math.min(this.low, ...ys), Math.max(this.high, ...ys)];
    const [first, last] = [this.points[0][0], Math.max(this.points.at(-1)[0], this.points[0][0] + 1)];
    const x = (value) => box.left + ((value - first) / (last - first)) * (box.right - box.left);
    const y = (value) => box.bottom - ((value - low) / (high - low)) * (box.bottom - box.top);
    for (const tick of ticks(low, high, 4)) {
      this.svg.append(element("line", { class: "grid", x1: box.left, x2: box.right, y1: y(tick), y2: y(tick) }));
      const place = { x: box.left - 6, y: y(tick) + 4, "text-anchor": "end" };
      this.svg.append(element("text", place, this.format(tick, true)));
    }
    for (const tick of ticks(first, last, Math.min(6, last - first)).filter(Number.isInteger)) {
      this.svg.append(element("text", { x: x(tick), y: height - 6, "text-anchor": "middle" }, String(tick)));
    }
    const path = (points) => points.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
    const smooth = this.mean && this.points.length > 2 * this.mean;
    this.svg.append(element("path", { class: smooth ? "curve faint" : "curve", d: path(this.points) }));
    if (smooth) this.svg.append(element("path", { class: "curve", d: path(trailingMean(this.points, this.mean)) }));
    this.mark(box, x, y);
  }

  mark(box, x, y) { // the newest point, or the one under the pointer
    const near = (best, point) => (Math.abs(x(point[0]) - this.hover) < Math.abs(x(best[0]) - this.hover) ? point : best);
    const [a, b] = this.hover === null ? this.points.at(-1) : this.points.reduce(near);
    if (this.hover !== null) {
      this.svg.append(element("line", { class: "hair", x1: x(a), x2: x(a), y1: box.top, y2: box.bottom }));
    }
    this.svg.append(element("circle", { class: "dot", cx: x(a), cy: y(b), r: 4.5 }));
    const words = `${this.name} ${a}: ${this.format(b, false)}`;
    this.svg.append(element("text", { class: "tip", x: box.right, y: 12, "text-anchor": "end" }, words));
  }
}

// ---- tables -------------------------------------------------------------------------------------------------------

function cell(text, ...classes) {
  const node = document.createElement("td");
  node.textContent = text;
  node.classList.add(...classes.filter(Boolean));
  return node;
}

function rows(id, cells, empty, columns) {
  const body = byId(id);
  const lines = cells.length ? cells : [[Object.assign(cell(empty, "note"), { colSpan: columns })]];
  body.replaceChildren(...lines.map((line) => {
    const row = document.createElement("tr");
    row.append(...line);
    return row;
  }));
}

function showNodes() {
  if (!latest) return;
  const off = (node) => ["offline", "banned"].includes(node.state) && "off";
  rows("nodes", latest.nodes.map((node) => [
    cell(node.label || "–"), cell(node.id, "code"), cell(node.state, off(node)),
    cell(node.version ?? "–", "n"), cell(number(node.tokens_per_second), "n"), cell(number(node.pending), "n"),
    cell(number(node.accepted), "n"), cell(number(node.token_identical), "n"),
    cell(number(node.rejected), "n", node.rejected && "bad"), cell(node.last_reason ?? "", "code"),
    cell(number(node.credit), "n"), cell(ago(Date.now() / 1000 - node.last_seen), "n"),
  ]), "none yet", 12);
}

function reasons(id, list) {
  rows(id, list.map(({ code, count, advice }) => [cell(number(count), "n"), cell(code, "code"), cell(advice, "note")]),
    "none", 3);
}

// ---- the document -------------------------------------------------------------------------------------------------

let latest = null;
const charts = {
  reward: new Chart("reward-chart", {
    name: "step", low: 0, high: 0.01, mean: MEAN_OF,
    format: (value, axis) => (axis ? String(+value.toFixed(4)) : value.toFixed(3)),
  }),
  pass_rate: new Chart("pass-chart", {
    name: "version", low: 0, high: 1, mean: 0,
    format: (value, axis) => (axis ? `${Math.round(100 * value)}%` : percent(value)),
  }),
};

function show(data) {
  latest = data;
  document.title = `${data.run}: step ${data.step} – farflung`;
  set("run", `${data.run} · spec ${data.spec}`);
  set("step", number(data.step));
  set("version", data.version === null ? "no version published" : `version ${data.version}`);
  set("reward", data.reward === null ? "–" : data.reward.toFixed(3));
  const [first, last] = [data.first_pass, data.latest_pass];
  const moved = last && first.version !== last.version;
  set("pass", !last ? "–" : moved ? `${percent(first.rate)} → ${percent(last.rate)}` : percent(last.rate));
  set("pass-note", !last ? "not evaluated yet" : `version ${last.version}: ${last.passed} of ${last.total}`);
  set("accepted", number(data.accepted));
  set("rejected", number(data.rejected));
  const refused = data.refusals.reduce((sum, { count }) => sum + count, 0);
  set("rejected-note", `${number(refused)} requests refused`);
  set("tokens", number(data.tokens_per_second));
  set("queue", `${number(data.queue.ready)} / ${number(data.queue.capacity)}`);
  set("queue-note", `rollouts ready, ${Math.round(100 * data.queue.fill)}% full`);
  const stale = data.staleness;
  set("staleness", stale ? stale.mean.toFixed(2) : "–");
  set("staleness-note", stale ? `versions, highest ${stale.max} of ${stale.limit} allowed` : "versions");
  set("bytes", bytes(data.bytes_published));
  set("relays", `${data.relays.alive} of ${data.relays.known} relays alive`);
  set("verdict", data.bottleneck.verdict);
  set("advice", data.bottleneck.advice);
  set("reward-key", data.series.reward.length > 2 * MEAN_OF ? `bold: mean of ${MEAN_OF} points` : "");
  charts.reward.show(data.series.reward);
  charts.pass_rate.show(data.series.pass_rate);
  showNodes();
  reasons("rejections", data.rejections);
  reasons("refusals", data.refusals);
}

function connection(state, words) {
  byId("connection").dataset.state = state;
  set("connection", words);
}

function connect() {
  const source = new EventSource("/events");
  source.onopen = () => connection("live", "live");
  source.onmessage = (event) => show(JSON.parse(event.data));
  source.onerror = () => {
    connection("lost", "connection lost, trying again");
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, 5000); // refused, not just interrupted
  };
}

connect();
setInterval(showNodes, 5000);
