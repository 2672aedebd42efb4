// What the server has told of the last minutes: columns over time, and what follows from them.

const KEPT = 15 * 60_000; // milliseconds
const SMOOTH = 2_000;

// Time `at` in milliseconds of the server's clock; the columns are those of the server's PageHistory.
export class History {
  constructor() {
    this.clear(0);
  }

  clear(started) {
    this.started = started;
    this.at = [];
    this.columns = {};
    this.caches = [];
    this.now = 0;
  }

  get newest() {
    return this.at.at(-1) ?? -1;
  }

  add(state) {
    if (state.started !== this.started) this.clear(state.started);
    const { at, caches, ...columns } = state.history;
    const fresh = at.findIndex((time) => time > this.newest);
    this.now = state.now;
    if (fresh >= 0) {
      this.at.push(...at.slice(fresh));
      for (const [name, values] of Object.entries(columns)) (this.columns[name] ??= []).push(...values.slice(fresh));
    }
    caches.forEach((cache, index) => this.addCache(index, cache, fresh));
    this.forget();
  }

  addCache(index, { forecasts, ...columns }, fresh) {
    const kept = (this.caches[index] ??= { columns: {}, forecasts: [] });
    if (fresh >= 0) {
      for (const [name, values] of Object.entries(columns)) (kept.columns[name] ??= []).push(...values.slice(fresh));
    }
    const last = kept.forecasts.at(-1)?.at ?? 0;
    kept.forecasts.push(...forecasts.filter((each) => each.at > last));
    // Steps are counted anew when a replica has been restarted: what was forecast before says nothing any more.
    const step = kept.columns.steps?.at(-1) ?? 0;
    kept.forecasts = kept.forecasts.filter((each) => each.step <= step + 1000 && each.at > this.now - KEPT);
  }

  forget() {
    const old = this.at.findIndex((time) => time > this.now - KEPT);
    if (old <= 0) return;
    this.at.splice(0, old);
    for (const values of Object.values(this.columns)) values.splice(0, old);
    for (const cache of this.caches) for (const values of Object.values(cache.columns)) values.splice(0, old);
  }

  // Of a column that only grows: by how much a second, over the last moments, at every time.
  rate(name) {
    const values = this.columns[name] ?? [];
    let first = 0;
    return this.at.map((time, index) => {
      while (first < index - 1 && this.at[first + 1] <= time - SMOOTH) first += 1;
      const seconds = (time - this.at[first]) / 1000;
      return seconds > 0 ? Math.max(0, values[index] - values[first]) / seconds : 0;
    });
  }

  // By how much columns have grown since so many seconds ago.
  growth(seconds, ...names) {
    const first = Math.max(0, this.at.findLastIndex((time) => time <= this.now - seconds * 1000));
    return names.map((name) => {
      const values = this.columns[name] ?? [0];
      return values.at(-1) - (values[first] ?? 0);
    });
  }
}

// When a replica reaches a step: as it was, and beyond now at the pace of the last moments.
export class Steps {
  constructor(at, steps, now) {
    this.at = at;
    this.steps = steps;
    this.now = now;
    const last = steps.length - 1;
    let first = last;
    while (first > 0 && (at[last] - at[first] < 3_000 || steps[last] === steps[first]) && at[last] - at[first] < 30_000) first -= 1;
    const made = last > 0 ? steps[last] - steps[first] : 0;
    this.pace = made > 0 ? (at[last] - at[first]) / made : 0; // milliseconds a step; 0: it is not known
  }

  timeOf(step) {
    const { at, steps } = this;
    const last = steps.length - 1;
    if (last < 0) return undefined;
    if (step >= steps[last]) return this.pace ? at[last] + (step - steps[last]) * this.pace : undefined;
    let low = 0;
    let high = last;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= step) low = middle;
      else high = middle;
    }
    const share = (step - steps[low]) / Math.max(1, steps[high] - steps[low]);
    return at[low] + Math.max(0, share) * (at[high] - at[low]);
  }
}
