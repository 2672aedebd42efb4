// Starts everything: asks the server for its state while the page is seen, and for a key where one is needed.

import { ApiError, get, key } from "./api.js";
import { Batches } from "./batches.js";
import { byId, setText } from "./format.js";
import { History } from "./history.js";
import { KeyDialog } from "./key.js";
import { Live } from "./live.js";
import { Playground } from "./playground.js";

const EVERY = 1_000; // milliseconds between two questions
const SLOWER = 4_000; // while the server does not answer

const history = new History();
const live = new Live(history);
const batches = new Batches();
const keys = new KeyDialog(() => watcher.now());
const playground = new Playground(() => keys.ask("The server did not take the request: it needs another key."));

// Asks again and again, one question at a time; not while nobody sees the page, nor while a key is missing.
class Watcher {
  constructor() {
    this.timer = 0;
    this.isAsking = false;
    this.isOffline = false;
    this.state = null;
    document.addEventListener("visibilitychange", () => this.now());
  }

  now() {
    clearTimeout(this.timer);
    if (!document.hidden && !this.isAsking) this.ask();
  }

  async ask() {
    this.isAsking = true;
    let wait = EVERY;
    try {
      this.take(await get(history.newest > 0 ? `/page/state?after=${history.newest}` : "/page/state"));
      await batches.refresh(this.state.has_batches);
    } catch (error) {
      if (!(error instanceof ApiError)) console.error(error);
      wait = this.failed(error);
    }
    this.isAsking = false;
    clearTimeout(this.timer);
    if (wait && !document.hidden) this.timer = setTimeout(() => this.now(), wait);
  }

  take(state) {
    this.state = state;
    history.add(state);
    live.show(state);
    playground.setModel(state.model, state.max_n);
    document.title = `${state.model.name} · toka-async`;
  }

  // How long to wait; 0: until there is a key.
  failed(error) {
    if (error.status === 401) {
      setText(byId("health"), key.get() ? "wrong API key" : "an API key is needed");
      byId("health-dot").className = "dot wait";
      keys.ask();
      return 0;
    }
    if (this.state) live.show(this.state, error.message);
    else setText(byId("health"), error.message);
    byId("health-dot").className = "dot bad";
    return SLOWER;
  }
}

const watcher = new Watcher();
watcher.now();
