// Batch jobs and how far they are, through the API's own route, with the user's key.

import { get } from "./api.js";
import { byId, count, duration, make, short } from "./format.js";

const EVERY = 3_000; // milliseconds
const SHOWN = 20;
const COLOURS = { completed: "good", in_progress: "", failed: "bad", expired: "bad", cancelled: "dim", cancelling: "wait" };

export class Batches {
  constructor() {
    this.asked = -Infinity;
    this.before = new Map(); // of each batch: when it was seen first while it ran, and how many lines had ended
  }

  // Asks again if the last answer is old. Raises ApiError.
  async refresh(hasBatches) {
    if (!hasBatches) {
      this.say("Batches need a folder: server.data_dir");
      return;
    }
    const now = performance.now();
    if (now - this.asked < EVERY) return;
    this.asked = now;
    const { data } = await get(`/v1/batches?limit=${SHOWN}`);
    this.say(data.length ? "" : "none yet");
    byId("batches").replaceChildren(...data.map((batch) => this.row(batch, now)));
  }

  say(text) {
    const none = byId("batches-none");
    none.textContent = text;
    none.hidden = !text;
  }

  row(batch, now) {
    const { completed, failed, total } = batch.request_counts;
    const ended = completed + failed;
    const meter = make("div", "meter");
    meter.setAttribute("role", "progressbar");
    meter.setAttribute("aria-label", batch.id);
    meter.setAttribute("aria-valuemax", total);
    meter.setAttribute("aria-valuenow", ended);
    for (const [colour, lines] of [["a", completed], ["bad", failed]]) {
      const part = make("i", colour);
      part.style.width = `${(100 * lines) / Math.max(1, total)}%`;
      meter.append(part);
    }
    const label = batch.metadata?.name ?? batch.metadata?.description ?? batch.id;
    const name = make("td", "", label);
    name.title = [batch.id, batch.endpoint, ...Object.entries(batch.metadata ?? {}).map((pair) => pair.join(": "))].join("\n");
    const status = make("td", COLOURS[batch.status] ?? "", batch.status.replace("_", " "));
    status.title = (batch.errors?.data ?? []).map((error) => error.message).join("\n");
    return make(
      "tr", "", name, status, make("td", "wide", meter),
      make("td", "number", `${count(ended)} / ${count(total)}`),
      make("td", failed ? "number bad" : "number", count(failed)),
      make("td", "number", short(batch.usage?.output_tokens ?? 0)),
      make("td", "number", this.left(batch, ended, total, now)),
    );
  }

  // How long it will take at the pace since this page sees it.
  left(batch, ended, total, now) {
    if (batch.status !== "in_progress") {
      this.before.delete(batch.id);
      return "–";
    }
    const first = this.before.get(batch.id) ?? { now, ended };
    this.before.set(batch.id, first);
    const pace = (ended - first.ended) / (now - first.now || 1);
    return pace > 0 ? duration(Math.ceil((total - ended) / pace / 1000)) : "…";
  }
}
