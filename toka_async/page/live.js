// The live half: tiles, charts, replicas and their memory.

import { Chart, valueAt } from "./chart.js";
import { byId, bytes, count, duration, make, setText, short } from "./format.js";
import { Steps } from "./history.js";

const EARLIER = [15, 45, 120]; // seconds ago of the forecasts that are drawn beside what came
const RECENT = 60; // seconds of which the tiles tell a mean
const AHEAD = 1 / 3; // of the time of the cache's chart

export class Live {
  constructor(history) {
    this.history = history;
    this.replica = 0;
    this.throughput = new Panel("throughput", short, [["a", "generated"], ["b", "prompts"]]);
    this.sequences = new Panel("sequences", short, [["a", "running"], ["c", "queued"]]);
    this.cache = new Panel("cache", short, [["a", "in use"], ["d", "kept"], ["f", "forecast", "dashed"]], {
      "in use": "tokens of running sequences, in the cache of this replica",
      kept: "tokens of earlier prompts, free to take",
      forecast: "what the running sequences will use until they have ended; thin: as it was forecast earlier, beside what came",
    });
    for (const input of document.querySelectorAll("input[name=window]")) {
      input.addEventListener("change", () => this.drawCharts());
    }
    const choice = byId("replica-choice");
    choice.addEventListener("change", () => {
      this.replica = Number(choice.value);
      this.drawCharts();
    });
  }

  get window() {
    return Number(document.querySelector("input[name=window]:checked").value);
  }

  // offline: why there is no new state.
  show(state, offline = null) {
    this.state = state;
    this.showHealth(state, offline);
    this.showFacts(state);
    this.showTiles(state);
    this.showDevices(state);
    this.drawCharts();
  }

  showHealth(state, offline) {
    const problem = offline ?? state?.problem;
    setText(byId("health"), problem ?? "serving");
    byId("health").className = problem ? "bad" : "";
    byId("health-dot").className = `dot ${problem ? (problem.includes("starting") ? "wait" : "bad") : "good"}`;
  }

  showFacts({ model, replicas, now, version }) {
    const devices = replicas.flatMap((replica) => replica.devices);
    setText(byId("model-name"), model.name);
    byId("model-name").title = `${model.name} · toka-async ${version}`;
    const names = [...new Set(devices.map((device) => device.device))].join(", ");
    setText(byId("fact-device"), names ? (devices.length > 1 ? `${devices.length} × ${names}` : names) : "–");
    setText(byId("fact-dtype"), [...new Set(devices.map((device) => device.dtype))].filter(Boolean).join(", ") || "–");
    setText(byId("fact-context"), model.max_context ? count(model.max_context) : "–");
    const tokens = replicas.reduce((sum, replica) => sum + replica.num_pages, 0) * model.page_size;
    setText(byId("fact-cache"), tokens ? `${short(tokens)} tokens` : "–");
    const seqs = replicas.reduce((sum, replica) => sum + replica.max_seqs, 0);
    setText(byId("fact-seqs"), seqs ? count(seqs) : "–");
    setText(byId("fact-uptime"), duration(Math.floor(now / 1000)));
  }

  showTiles({ load }) {
    const { history } = this;
    // An idle server says nothing new: what it made a moment ago is no pace of now.
    const isFresh = history.now - history.newest < 3_000;
    const rate = (name) => (isFresh ? (history.rate(name).at(-1) ?? 0) : 0);
    setText(byId("tile-generated"), short(Math.round(rate("generated_tokens"))));
    setText(byId("tile-prompt"), short(Math.round(rate("prompt_tokens"))));
    setText(byId("tile-running"), count(load.running));
    setText(byId("tile-waiting"), count(load.waiting));
    setText(byId("tile-cache"), (load.kv_cache_usage * 100).toFixed(1));
    const [queries, hits, first, seconds] = history.growth(
      RECENT, "prefix_queries", "prefix_hits", "first_tokens", "first_token_seconds",
    );
    setText(byId("tile-hits"), queries > 0 ? ((hits / queries) * 100).toFixed(0) : "–");
    setText(byId("tile-first"), first > 0 ? short(Math.round((seconds / first) * 1000)) : "–");
  }

  showDevices({ replicas, load }) {
    const rows = replicas.flatMap((replica, index) => {
      const state = load.replicas[index].state;
      const devices = replica.devices.length ? replica.devices : [null];
      return devices.map((device) => deviceRow(index, replica, state, device));
    });
    byId("devices").replaceChildren(...rows);
    const choice = byId("replica-choice");
    if (choice.options.length !== replicas.length) {
      choice.replaceChildren(...replicas.map((_, index) => new Option(`replica ${index}`, index)));
      choice.hidden = replicas.length < 2;
    }
  }

  drawCharts() {
    const { history } = this;
    if (!this.state) return;
    const span = this.window * 1000;
    const view = { from: history.now - span, to: history.now, now: history.now, marks: marks(history.now, span, 0) };
    const at = this.upToNow(history.at);
    const generated = { at, values: this.upToNow(history.rate("generated_tokens"), 0), colour: "a", area: true };
    const prompt = { at, values: this.upToNow(history.rate("prompt_tokens"), 0), colour: "b" };
    this.throughput.draw([generated, prompt], { ...view, least: 10 });
    const held = (name) => this.upToNow(history.columns[name] ?? []);
    const running = { at, values: held("running"), colour: "a", area: true, step: true };
    const waiting = { at, values: held("waiting"), colour: "c", step: true };
    this.sequences.draw([running, waiting], { ...view, least: 3.7 });
    this.drawCache(span);
  }

  // A column that goes on to now: with its last value, as nothing has changed since, or with another one.
  upToNow(values, last = values.at(-1)) {
    const { at, now, newest } = this.history;
    if (values === at) return [...at, Math.min(newest + 500, now), now];
    const isIdle = now - newest > 3_000;
    return [...values, isIdle ? last : values.at(-1), isIdle ? last : values.at(-1)];
  }

  drawCache(span) {
    const { history, state } = this;
    const { columns, forecasts } = history.caches[this.replica] ?? { columns: {}, forecasts: [] };
    const size = state.model.page_size;
    const tokens = (pages) => pages.map((each) => each * size);
    const steps = new Steps(history.at, columns.steps ?? [], history.now);
    const curve = (forecast, until) => {
      const points = forecast.pages
        .map((pages, i) => [steps.timeOf(forecast.step + (forecast.steps * i) / (forecast.pages.length - 1)), pages * size])
        .filter(([time]) => time !== undefined && time <= until);
      return { at: points.map(([time]) => time), values: points.map(([, value]) => value), colour: "f" };
    };
    const used = { at: this.upToNow(history.at), values: this.upToNow(tokens(columns.pages_used ?? [])), colour: "a", area: true };
    const kept = { at: used.at, values: this.upToNow(tokens(columns.pages_cached ?? [])), colour: "d" };
    const newest = forecasts.at(-1);
    const isRunning = state.load.replicas[this.replica]?.running > 0;
    const now = newest && isRunning && history.now - newest.at < 5_000 ? [{ ...curve(newest, Infinity), dashed: true }] : [];
    const earlier = this.earlier(forecasts).map((each) => ({ ...curve(each, history.now), faint: 0.8 }));
    const limit = newest?.limit ?? state.replicas[this.replica]?.num_pages ?? 0;
    const future = span * AHEAD;
    this.cache.draw([kept, used, ...earlier, ...now], {
      from: history.now - span + future,
      to: history.now + future,
      now: history.now,
      marks: marks(history.now, span - future, future),
      ceiling: { value: limit * size, text: `admission stops at ${short(limit * size)}` },
      least: size,
    }, [[used], [kept], now.length ? now : earlier]);
  }

  // Of what was forecast, one from each of some moments ago, kept while it is drawn: lines do not jump about.
  earlier(forecasts) {
    const { now } = this.history;
    const every = 15_000;
    const marked = forecasts.filter((each, i) => i === 0 || Math.floor(each.at / every) !== Math.floor(forecasts[i - 1].at / every));
    const within = marked.filter((each) => now - each.at < this.window * 1000 && now - each.at > 2_000);
    return within.slice(-EARLIER.length);
  }
}

// A chart with a legend that says the newest values, or those under the pointer.
class Panel {
  constructor(name, label, entries, meanings = {}) {
    const canvas = byId(`chart-${name}`);
    this.canvas = canvas;
    this.title = canvas.getAttribute("aria-label");
    this.label = label;
    this.entries = entries.map(([colour, text, style = ""]) => ({ colour, text, style, value: make("b") }));
    for (const { colour, text, style, value } of this.entries) {
      const item = make("li", "", make("span", `swatch ${colour} ${style}`), text, value);
      item.title = meanings[text] ?? "";
      byId(`legend-${name}`).append(item);
    }
    this.chart = new Chart(canvas, label);
    this.chart.onPointer = (time) => this.tell(time);
  }

  // told: of each entry of the legend the series that it tells of: the first that has a value at the time.
  draw(series, view, told = series.map((each) => [each])) {
    this.told = told;
    this.chart.draw(series, view);
    this.tell(this.chart.pointer === null ? null : this.chart.timeAt(this.chart.pointer));
  }

  tell(time) {
    const texts = this.entries.map((entry, i) => {
      const values = this.told[i].map((each) => (time === null ? newest(each) : valueAt(each, time)));
      const value = values.find((each) => each !== undefined);
      const sign = time === null && entry.style ? "≤ " : "";
      return value === undefined ? "–" : sign + this.label(Math.round(value));
    });
    this.entries.forEach((entry, i) => setText(entry.value, texts[i]));
    if (time === null) {
      this.canvas.setAttribute("aria-label", `${this.title}: ${this.entries.map((entry, i) => `${entry.text} ${texts[i]}`).join(", ")}`);
    }
  }
}

// What a series says of now; of what is to come the most.
const newest = ({ values, dashed, faint }) => (faint ? undefined : dashed ? Math.max(...values) : values.at(-1));

function marks(now, past, future) {
  const step = past + future > 400_000 ? 120_000 : past + future > 100_000 ? 60_000 : 20_000;
  const made = [{ time: now, text: "now" }];
  for (let ago = step; ago <= past; ago += step) made.push({ time: now - ago, text: `−${duration(ago / 1000).replace(" 0 s", "")}` });
  for (let ahead = step; ahead <= future; ahead += step) made.push({ time: now + ahead, text: `+${duration(ahead / 1000).replace(" 0 s", "")}` });
  return made;
}

function deviceRow(index, replica, state, device) {
  const row = make("tr");
  const word = make("td", { up: "good", starting: "wait", lost: "bad" }[state], state);
  if (replica.problem) word.title = replica.problem;
  if (replica.restarts) word.append(make("small", "", ` ${replica.restarts} ${replica.restarts === 1 ? "restart" : "restarts"}`));
  row.append(make("td", "", device ? `${index}.${device.rank}` : `${index}`), word);
  if (!device) return row;
  const name = make("td", "", device.device);
  name.title = device.device;
  row.append(name);
  if (!device.total) {
    const none = make("td", "dim", "computes nothing");
    none.colSpan = 5;
    row.append(none);
    return row;
  }
  const other = Math.max(0, device.total - device.free - device.weights - device.cache);
  const meter = make("div", "meter");
  meter.title = `of ${bytes(device.total)}`;
  for (const [colour, size] of [["b", device.weights], ["a", device.cache], ["d", other]]) {
    const part = make("i", colour);
    part.style.width = `${(100 * size) / device.total}%`;
    meter.append(part);
  }
  row.append(make("td", "wide", meter));
  for (const size of [device.weights, device.cache, other, device.free]) row.append(make("td", "number", bytes(size)));
  return row;
}
