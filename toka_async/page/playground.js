// The playground: one prompt, n samples, streamed side by side, and the vote over their final answers.

import { ApiError, stream } from "./api.js";
import { byId, count, make, setText, short } from "./format.js";
import { Board } from "./samples.js";
import { FINAL, tally } from "./vote.js";

const MOST_SAMPLES = 64;
const SHOWN_ANSWERS = 8;
const NUMBERS = ["n", "temperature", "max_tokens", "top_p", "top_k", "min_p", "repetition_penalty"];
const FIRST = {
  completion: "Question: Ana has 21 books. She finds 18 more. Then she gives 9 to Tom. How many books does Ana have in the end?\nAnswer:",
  chat: "Ana has 21 books. She finds 18 more. Then she gives 9 to Tom. How many books does Ana have in the end?",
};

export class Playground {
  // onKey: called when the server wants another API key.
  constructor(onKey) {
    this.onKey = onKey;
    this.form = byId("try");
    this.board = new Board();
    this.vote = new Vote(this.board);
    this.run = null;
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.form.addEventListener("change", () => this.showKind());
    this.form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.form.requestSubmit();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !byId("key-dialog").open) this.stop();
    });
    byId("stop").addEventListener("click", () => this.stop());
    this.field("prompt").value = FIRST.completion;
    this.showKind();
  }

  field(name) {
    return this.form.elements.namedItem(name);
  }

  setModel(model, maxN) {
    this.model = model;
    this.field("n").max = Math.min(MOST_SAMPLES, maxN);
    this.field("temperature").placeholder = model.temperature;
    const chat = byId("kind-chat");
    chat.disabled = !model.has_chat;
    chat.parentElement.title = model.has_chat ? "" : "The model has no chat template";
  }

  showKind() {
    const kind = this.field("kind").value;
    byId("system-field").hidden = kind !== "chat";
    setText(byId("prompt-label"), kind === "chat" ? "Message" : "Prompt");
    const prompt = this.field("prompt");
    if (Object.values(FIRST).includes(prompt.value)) prompt.value = FIRST[kind];
  }

  // The path and body of what the form asks for. Raises ApiError for what is no number.
  request() {
    const kind = this.field("kind").value;
    const body = { stream_options: { include_usage: true } };
    if (this.model) body.model = this.model.name;
    for (const name of NUMBERS) {
      const input = this.field(name);
      if (input.validity.badInput) throw new ApiError(`'${name}' is not a number`, 400, name);
      if (input.value !== "") body[name] = Number(input.value);
    }
    if (body.n > MOST_SAMPLES) throw new ApiError(`'n': this page shows at most ${MOST_SAMPLES} samples`, 400, "n");
    const seed = this.field("seed").value.trim();
    if (seed) body.seed = /^-?\d+$/.test(seed) ? Number(seed) : seed;
    const stops = this.field("stop").value.split("\n").filter((line) => line !== "");
    if (stops.length) body.stop = stops;
    const schema = this.field("response_format").value.trim();
    if (schema) body.response_format = formatOf(schema);
    const logprobs = this.field("logprobs").value;
    if (!logprobs) body.return_token_ids = true; // to count them
    if (kind === "completion") {
      if (logprobs) body.logprobs = Number(logprobs);
      return ["/v1/completions", { ...body, prompt: this.field("prompt").value }];
    }
    if (logprobs) Object.assign(body, { logprobs: true, top_logprobs: Number(logprobs) });
    const system = this.field("system").value;
    const messages = [...(system ? [{ role: "system", content: system }] : []), { role: "user", content: this.field("prompt").value }];
    return ["/v1/chat/completions", { ...body, messages }];
  }

  async send() {
    this.stop();
    this.showError(null);
    let path, body;
    try {
      [path, body] = this.request();
    } catch (error) {
      this.showError(error);
      return;
    }
    const run = (this.run = new Run(body.n ?? 1, this.board, this.vote));
    byId("stop").disabled = false;
    setText(byId("run-status"), "sampling…");
    try {
      await run.read(stream(path, body, run.abort.signal));
      setText(byId("run-status"), "done");
    } catch (error) {
      const isStopped = error.name === "AbortError";
      setText(byId("run-status"), isStopped ? "stopped" : "failed");
      if (!isStopped && this.run === run) this.showError(error);
    }
    run.end();
    if (this.run === run) byId("stop").disabled = true;
  }

  stop() {
    this.run?.abort.abort();
  }

  // Beside the field that is at fault, if the API names one.
  showError(error) {
    for (const input of this.form.querySelectorAll("[aria-invalid]")) {
      input.removeAttribute("aria-invalid");
      input.removeAttribute("aria-describedby");
    }
    const place = byId("try-error");
    place.hidden = !error;
    setText(place, error ? error.message : "");
    if (!error) return;
    if (!(error instanceof ApiError)) console.error(error);
    if (error.status === 401) this.onKey();
    const input = this.fieldOf(error.param ?? "");
    if (!input) return;
    input.setAttribute("aria-invalid", "true");
    input.setAttribute("aria-describedby", "try-error");
    input.closest("details")?.setAttribute("open", "");
    input.focus();
  }

  fieldOf(param) {
    const name = param.replace(/[.[].*$/, "");
    const known = { messages: "prompt", top_logprobs: "logprobs", max_completion_tokens: "max_tokens" }[name] ?? name;
    const found = known ? this.field(known) : null;
    return found instanceof Element ? found : null;
  }
}

// What asks for JSON by a schema, exactly. Raises ApiError for what is no JSON.
function formatOf(schema) {
  try {
    return { type: "json_schema", json_schema: { name: "answer", strict: true, schema: JSON.parse(schema) } };
  } catch (error) {
    throw new ApiError(`'response_format' is not JSON: ${error.message}`, 400, "response_format");
  }
}

// One request while it runs.
class Run {
  constructor(n, board, vote) {
    this.abort = new AbortController();
    this.board = board;
    this.vote = vote;
    this.began = performance.now();
    this.first = null;
    this.ended = null;
    this.numTokens = 0;
    this.usage = null;
    this.frame = 0;
    this.thinking = new Set(); // the samples that have said no word of their answers yet
    this.n = n;
    byId("results").classList.add("waiting");
  }

  // The answer has begun: what was there before makes room for it.
  begin() {
    this.first = performance.now();
    byId("results").classList.remove("waiting");
    byId("colours").classList.remove("used");
    this.board.begin(this.n);
    this.vote.begin();
  }

  async read(events) {
    for await (const some of events) {
      if (this.abort.signal.aborted) return;
      if (this.first === null) this.begin();
      for (const event of some) this.take(event);
      this.frame ||= requestAnimationFrame(() => this.show());
    }
  }

  take(event) {
    this.usage = event.usage ?? this.usage;
    for (const choice of event.choices) {
      const tokens = tokensOf(choice.logprobs);
      const numTokens = tokens.length || (choice.token_ids?.length ?? 0);
      this.numTokens += numTokens;
      if (tokens.length) byId("colours").classList.add("used");
      this.board.add({
        index: choice.index,
        text: this.textOf(choice),
        tokens,
        numTokens,
        finish: choice.finish_reason,
      });
    }
  }

  // What a choice adds: text; of a chat also what the model thinks, and its calls.
  textOf({ index, text, delta }) {
    if (!delta) return text;
    const calls = (delta.tool_calls ?? []).map(({ function: called }) => `${called.name}(${called.arguments})`);
    const said = [...(delta.content ? [delta.content] : []), ...calls].join("\n");
    if (delta.reasoning) this.thinking.add(index);
    const isAnswer = said !== "" && this.thinking.delete(index);
    return (delta.reasoning ?? "") + (isAnswer || calls.length ? "\n\n" : "") + said;
  }

  // It has ended, one way or another: what it measured stays.
  end() {
    this.ended = performance.now();
    cancelAnimationFrame(this.frame);
    byId("results").classList.remove("waiting");
    if (this.first !== null) this.show();
  }

  show() {
    this.frame = 0;
    this.board.flush();
    this.vote.show();
    const seconds = ((this.ended ?? performance.now()) - this.began) / 1000;
    const done = this.board.samples.filter((sample) => sample.finish).length;
    setText(byId("run-samples"), `${done} / ${this.board.samples.length}`);
    setText(byId("run-tokens"), count(this.usage?.completion_tokens ?? this.numTokens));
    setText(byId("run-seconds"), seconds.toFixed(2));
    setText(byId("run-rate"), this.numTokens ? short(Math.round(this.numTokens / seconds)) : "–");
    setText(byId("run-first"), this.first ? `${Math.round(this.first - this.began)} ms` : "–");
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    setText(byId("run-prompt"), this.usage ? `${count(this.usage.prompt_tokens)} tokens${cached ? `, ${count(cached)} cached` : ""}` : "–");
  }
}

// The tokens in the log-probs of a choice, of completions or of chat: text, log-prob, what else was likely.
function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map(({ token, logprob, top_logprobs }) => ({
      text: token,
      logprob,
      top: top_logprobs.map((other) => ({ text: other.token, logprob: other.logprob })),
    }));
  }
  return (logprobs.tokens ?? []).map((text, i) => ({
    text,
    logprob: logprobs.token_logprobs[i],
    top: Object.entries(logprobs.top_logprobs[i] ?? {}).map(([other, logprob]) => ({ text: other, logprob })),
  }));
}

// The answers that most samples came to. A click shows the samples of one.
class Vote {
  constructor(board) {
    this.board = board;
    this.chosen = null;
    this.rows = Array.from({ length: SHOWN_ANSWERS }, () => this.row());
    byId("vote").replaceChildren(...this.rows.map((row) => row.item));
    for (const input of document.querySelectorAll("input[name=vote]")) {
      input.addEventListener("change", () => {
        this.chosen = null;
        this.show();
      });
    }
  }

  row() {
    const [answer, meter, part, votes] = [make("span", "answer"), make("span", "meter"), make("i", "a"), make("span", "count")];
    meter.append(part);
    const button = make("button", "", answer, meter, votes);
    button.type = "button";
    const row = { item: make("li", "", button), button, answer, part, votes, text: null };
    button.addEventListener("click", () => {
      this.chosen = this.chosen === row.text ? null : row.text;
      this.show();
    });
    row.item.hidden = true;
    return row;
  }

  begin() {
    this.chosen = null;
  }

  show() {
    const kind = document.querySelector("input[name=vote]:checked").value;
    const final = FINAL[kind];
    byId("vote").classList.toggle("lines", kind === "line");
    const answers = this.board.samples.map((sample) => (sample.finish ? final(sample.text) : undefined));
    const votes = tally(answers);
    const total = answers.filter((answer) => answer !== undefined).length;
    this.rows.forEach((row, index) => {
      const [answer, votesOf] = votes[index] ?? [null, 0];
      row.item.hidden = answer === null;
      row.text = answer;
      if (answer === null) return;
      setText(row.answer, answer);
      row.answer.title = answer;
      row.part.style.width = `${(100 * votesOf) / total}%`;
      setText(row.votes, `${votesOf} of ${total}, ${Math.round((100 * votesOf) / total)} %`);
      row.button.setAttribute("aria-pressed", this.chosen === answer);
    });
    this.board.showAnswers(answers, votes[0]?.[0], this.chosen);
  }
}
