// Curves over time on a canvas. Knows points and colours, and nothing of what they mean.

const LEFT = 46; // pixels for the numbers of the axis
const RIGHT = 14;
const TOP = 12;
const BOTTOM = 22;

function nice(most) {
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10].map((step) => step * power).find((step) => step >= most);
}

export class Chart {
  // label: of a value on the axis.
  constructor(canvas, label) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.label = label;
    this.pointer = null;
    this.onPointer = () => {};
    this.top = 0;
    canvas.addEventListener("pointermove", (event) => this.point(event.offsetX));
    canvas.addEventListener("pointerleave", () => this.point(null));
    new ResizeObserver(() => this.redraw()).observe(canvas);
    matchMedia("(prefers-color-scheme: light)").addEventListener("change", () => this.redraw());
  }

  point(x) {
    this.pointer = x;
    this.redraw();
    this.onPointer(x === null ? null : this.timeAt(x));
  }

  timeAt(x) {
    const { from, to } = this.view;
    return from + ((x - LEFT) / Math.max(1, this.width - LEFT - RIGHT)) * (to - from);
  }

  // series: {at, values, colour, area, dashed, faint, step}; view: {from, to, now, marks, ceiling, least}: times in
  // milliseconds; marks: {time, text}; ceiling: {value, text}, drawn if it is near; least: the axis goes that far.
  draw(series, view) {
    this.series = series;
    this.view = view;
    this.redraw();
  }

  redraw() {
    if (!this.view) return;
    const { canvas, context, series, view } = this;
    const scale = devicePixelRatio || 1;
    this.width = canvas.clientWidth;
    this.height = canvas.clientHeight;
    if (!this.width) return;
    if (canvas.width !== Math.round(this.width * scale) || canvas.height !== Math.round(this.height * scale)) {
      canvas.width = Math.round(this.width * scale);
      canvas.height = Math.round(this.height * scale);
    }
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    const style = getComputedStyle(canvas);
    this.colour = (name) => style.getPropertyValue(`--${name}`).trim();
    this.font = style.fontFamily;
    this.scaleTo(series, view);
    this.drawGrid(view);
    context.save();
    context.beginPath();
    context.rect(LEFT, TOP - 2, this.width - LEFT - RIGHT, this.height - TOP - BOTTOM + 3);
    context.clip();
    for (const each of series) this.drawSeries(each);
    context.restore();
    this.drawMarks(view);
  }

  // The axis' top: of nice numbers the next; it comes down only when it is far too high, so that it does not flicker.
  scaleTo(series, view) {
    let most = view.least ?? 1;
    for (const { at, values } of series) {
      for (let i = 0; i < at.length; i += 1) {
        if (at[i] >= view.from && at[i] <= view.to && values[i] > most) most = values[i];
      }
    }
    if (view.ceiling && most > view.ceiling.value * 0.45) most = Math.max(most, view.ceiling.value);
    const wanted = nice(most * 1.08);
    if (wanted > this.top || wanted < this.top * 0.65) this.top = wanted;
  }

  x(time) {
    const { from, to } = this.view;
    return LEFT + ((time - from) / (to - from)) * (this.width - LEFT - RIGHT);
  }

  y(value) {
    return this.height - BOTTOM - (value / this.top) * (this.height - TOP - BOTTOM);
  }

  drawGrid(view) {
    const { context } = this;
    context.font = `11px ${this.font}`;
    context.fillStyle = this.colour("dim");
    context.strokeStyle = this.colour("grid");
    context.lineWidth = 1;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (let i = 0; i <= 4; i += 1) {
      const value = (this.top / 4) * i;
      const y = Math.round(this.y(value)) + 0.5;
      context.beginPath();
      context.moveTo(LEFT, y);
      context.lineTo(this.width - RIGHT, y);
      context.stroke();
      if (i % 2 === 0) context.fillText(this.label(value), LEFT - 7, y);
    }
    context.textBaseline = "top";
    for (const { time, text } of view.marks) {
      const x = Math.round(this.x(time)) + 0.5;
      context.textAlign = x > this.width - RIGHT - 14 ? "right" : x < LEFT + 14 ? "left" : "center";
      context.fillText(text, Math.min(x, this.width - 4), this.height - BOTTOM + 6);
    }
  }

  drawSeries({ at, values, colour, area, dashed, faint, step }) {
    const { context, view } = this;
    let first = at.findIndex((time) => time >= view.from);
    if (first < 0) first = at.length;
    first = Math.max(0, first - 1);
    if (first >= at.length) return;
    context.beginPath();
    for (let i = first; i < at.length; i += 1) {
      const x = this.x(at[i]);
      const y = this.y(values[i]);
      if (i === first) context.moveTo(x, y);
      else if (step) {
        context.lineTo(x, this.y(values[i - 1]));
        context.lineTo(x, y);
      } else context.lineTo(x, y);
      if (at[i] > view.to) break;
    }
    context.strokeStyle = this.colour(colour);
    context.globalAlpha = faint ?? 1;
    context.lineWidth = faint ? 1 : 1.5;
    context.lineJoin = "round";
    context.setLineDash(dashed ? [4, 3] : []);
    context.stroke();
    context.setLineDash([]);
    if (area) {
      context.lineTo(this.x(Math.min(view.to, at.at(-1))), this.y(0));
      context.lineTo(this.x(at[first]), this.y(0));
      context.globalAlpha = 0.14;
      context.fillStyle = this.colour(colour);
      context.fill();
    }
    context.globalAlpha = 1;
  }

  drawMarks(view) {
    const { context } = this;
    if (view.ceiling && view.ceiling.value <= this.top) {
      const y = Math.round(this.y(view.ceiling.value)) + 0.5;
      this.line(LEFT, y, this.width - RIGHT, y, "dim", [2, 3]);
      context.textAlign = "left";
      context.textBaseline = "bottom";
      context.fillStyle = this.colour("dim");
      context.fillText(view.ceiling.text, LEFT + 4, y - 2);
    }
    if (view.now < view.to) {
      const x = Math.round(this.x(view.now)) + 0.5;
      this.line(x, TOP, x, this.height - BOTTOM, "dim", []);
    }
    if (this.pointer !== null && this.pointer >= LEFT && this.pointer <= this.width - RIGHT) {
      this.line(this.pointer + 0.5, TOP, this.pointer + 0.5, this.height - BOTTOM, "text", []);
    }
  }

  line(x, y, toX, toY, colour, dashes) {
    const { context } = this;
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(toX, toY);
    context.setLineDash(dashes);
    context.strokeStyle = this.colour(colour);
    context.globalAlpha = 0.6;
    context.lineWidth = 1;
    context.stroke();
    context.globalAlpha = 1;
    context.setLineDash([]);
  }
}

// The value that a series has at a time; undefined outside of it.
export function valueAt({ at, values }, time) {
  if (!at.length || time < at[0] || time > at.at(-1)) return undefined;
  const index = at.findLastIndex((each) => each <= time);
  return values[index];
}
