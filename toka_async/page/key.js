// The API key, as people enter it. It goes nowhere but into the header of requests to this server.

import { key } from "./api.js";
import { byId, setText } from "./format.js";

export class KeyDialog {
  // onKey: called when there is another one.
  constructor(onKey) {
    this.dialog = byId("key-dialog");
    this.input = byId("key-input");
    byId("key-button").addEventListener("click", () => this.ask("A key that is entered here stays in this tab and is forgotten when the tab is closed."));
    byId("key-cancel").addEventListener("click", () => this.dialog.close());
    byId("key-forget").addEventListener("click", () => this.use("", onKey));
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.input.value.trim()) this.use(this.input.value.trim(), onKey);
    });
    this.show();
  }

  ask(reason = "This server asks for a key. It stays in this tab and is forgotten when the tab is closed.") {
    setText(byId("key-reason"), key.get() && !reason.includes("entered") ? `The key was not accepted. ${reason}` : reason);
    byId("key-forget").disabled = !key.get();
    if (!this.dialog.open) this.dialog.showModal();
    this.input.focus();
  }

  use(text, onKey) {
    key.set(text);
    this.input.value = "";
    this.dialog.close();
    this.show();
    onKey();
  }

  show() {
    setText(byId("key-button"), key.get() ? "API key set" : "API key");
  }
}
