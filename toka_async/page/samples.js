// The samples side by side: their text as it comes, each token coloured by its probability, and what else was likely.

import { byId, make, setText } from "./format.js";

const MOST_SPANS = 40_000; // of all samples: more elements make a browser slow; what follows is plain text
const BOUNDS = [0.05, 0.2, 0.4, 0.65, 0.9]; // probabilities between the colours
const MARGIN = 12; // pixels

// One sample's card. Texts of a model are text nodes, whatever is in them.
class Sample {
  constructor(index, board) {
    this.index = index;
    this.board = board;
    this.text = "";
    this.numTokens = 0;
    this.finish = null;
    this.pending = [];
    this.isPinned = true; // it shows its end while it grows, unless somebody has scrolled it
    this.answer = make("b", "", "");
    this.note = make("span", "", "");
    this.body = make("div", "text");
    this.body.tabIndex = 0;
    this.body.setAttribute("role", "group");
    this.body.setAttribute("aria-label", `Sample ${index + 1}`);
    this.element = make("li", "sample", make("header", "", make("span", "", `${index + 1}`), this.answer, this.note), this.body);
    this.body.addEventListener("wheel", (event) => this.scrolled(event.deltaY < 0), { passive: true });
  }

  scrolled(isUp) {
    const { scrollTop, clientHeight, scrollHeight } = this.body;
    this.isPinned = !isUp && scrollTop + clientHeight > scrollHeight - 40;
  }

  // Puts what has come into the page.
  flush() {
    for (const { text, tokens } of this.pending) this.append(text, tokens);
    this.pending = [];
    const why = { stop: "", length: " cut" }[this.finish] ?? "";
    setText(this.note, `${this.numTokens}${why}`);
    this.note.title = this.finish === "length" ? "tokens; it reached the most that were asked for" : "tokens";
  }

  append(text, tokens) {
    this.text += text;
    if (!tokens.length || this.board.numSpans > MOST_SPANS) {
      const last = this.body.lastChild;
      if (last?.nodeType === Node.TEXT_NODE) last.appendData(text);
      else this.body.append(text);
      return;
    }
    for (const [shown, of] of split(text, tokens)) {
      const likelihood = Math.exp(Math.min(...of.map((token) => token.logprob)));
      const span = make("span", `p${BOUNDS.filter((bound) => likelihood >= bound).length}`, shown);
      this.board.tokens.set(span, of);
      this.body.append(span);
      this.board.numSpans += 1;
    }
  }
}

// A chunk's text in pieces, each with its tokens. Tokens can be parts of characters, or of what is not shown, as the end
// is: from the first such token on, the rest of the chunk is one piece.
export function split(text, tokens) {
  const parts = [];
  let length = 0;
  let index = 0;
  for (; index < tokens.length && text.startsWith(tokens[index].text, length); index += 1) {
    parts.push([tokens[index].text, [tokens[index]]]);
    length += tokens[index].text.length;
  }
  const [rest, of] = [text.slice(length), tokens.slice(index)];
  if (rest && !of.length) parts.at(-1)[0] += rest;
  else parts.push([rest, of]);
  return parts.filter(([shown]) => shown);
}

// All samples of a run.
export class Board {
  constructor() {
    this.list = byId("samples");
    this.samples = [];
    this.tokens = new WeakMap(); // of a span
    this.numSpans = 0;
    this.dirty = new Set();
    this.tip = new Tip();
    this.list.addEventListener("pointerover", (event) => this.point(event.target));
    this.list.addEventListener("pointerleave", () => this.tip.hide());
    this.list.addEventListener("keydown", (event) => this.move(event));
    this.list.addEventListener("focusout", () => this.leave());
    document.addEventListener("scroll", () => this.tip.hide(), { capture: true, passive: true });
  }

  begin(count) {
    this.tip.hide();
    this.numSpans = 0;
    this.dirty.clear();
    this.samples = Array.from({ length: count }, (_, index) => new Sample(index, this));
    this.list.replaceChildren(...this.samples.map((sample) => sample.element));
    this.list.classList.toggle("few", count <= 3);
  }

  // One choice of an event.
  add({ index, text, tokens, numTokens, finish }) {
    const sample = this.samples[index];
    sample.pending.push({ text, tokens });
    sample.numTokens += numTokens;
    sample.finish = finish ?? sample.finish;
    this.dirty.add(sample);
  }

  flush() {
    for (const sample of this.dirty) sample.flush();
    for (const sample of this.dirty) if (sample.isPinned) sample.body.scrollTop = 1e9; // once all of them have grown
    this.dirty.clear();
  }

  // answers: of each sample. best: the answer that most have. chosen: that whose samples are to be seen, if any.
  showAnswers(answers, best, chosen) {
    this.samples.forEach((sample, index) => {
      const answer = answers[index];
      setText(sample.answer, answer ?? "");
      sample.answer.title = answer ?? "";
      sample.element.classList.toggle("winner", answer !== undefined && answer === best);
      sample.element.classList.toggle("faded", chosen !== null && answer !== chosen);
    });
  }

  point(target) {
    const tokens = this.tokens.get(target);
    if (tokens) this.tip.show(target, tokens);
    else this.tip.hide();
  }

  // Arrows go from token to token of the sample that has the focus.
  move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const body = event.target;
    if (!step || !body.classList.contains("text") || !body.children.length) return;
    event.preventDefault();
    const before = body.querySelector(".current");
    const next = before ? (step > 0 ? before.nextElementSibling : before.previousElementSibling) : body.firstElementChild;
    if (!next) return;
    this.leave();
    next.classList.add("current");
    next.scrollIntoView({ block: "nearest" });
    this.tip.show(next, this.tokens.get(next));
  }

  leave() {
    this.list.querySelector(".current")?.classList.remove("current");
    this.tip.hide();
  }
}

// What was likely in a token's place.
class Tip {
  constructor() {
    this.element = byId("tip");
  }

  show(target, tokens) {
    this.element.replaceChildren(...tokens.map((token) => table(token)));
    this.element.hidden = false;
    const place = target.getClientRects()[0] ?? target.getBoundingClientRect();
    const { width, height } = this.element.getBoundingClientRect();
    const left = Math.min(Math.max(MARGIN, place.left), innerWidth - width - MARGIN);
    const above = place.top - height - 6;
    this.element.style.transform = `translate(${Math.round(left)}px, ${Math.round(above > MARGIN ? above : place.bottom + 6)}px)`;
  }

  hide() {
    this.element.hidden = true;
  }
}

function table(token) {
  const others = token.top.filter((other) => other.text !== token.text || Math.abs(other.logprob - token.logprob) > 1e-6);
  const rows = [{ ...token, isChosen: true }, ...others].sort((one, other) => other.logprob - one.logprob);
  return make("table", "", make("tbody", "", ...rows.map(({ text, logprob, isChosen }) => make(
    "tr", isChosen ? "chosen" : "",
    make("td", "", visible(text)),
    make("td", "number", `${(100 * Math.exp(logprob)).toFixed(logprob > -4.6 ? 1 : 3)} %`),
    make("td", "number", logprob.toFixed(3)),
  ))));
}

const visible = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
