// Numbers and elements for people.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (value) => whole.format(value);

// 12.3k, 4.56M: at most four characters of a number, so that columns stay as wide as they are.
export function short(value) {
  for (const [size, letter] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (value >= size) {
      const scaled = value / (letter === "k" ? 1e3 : size);
      return scaled.toFixed(scaled >= 100 ? 0 : 1).replace(".0", "") + letter;
    }
  }
  return value >= 100 || Number.isInteger(value) ? whole.format(value) : value.toFixed(1);
}

export function bytes(value) {
  for (const [power, unit] of [[40, "TiB"], [30, "GiB"], [20, "MiB"], [10, "KiB"]]) {
    const scaled = value / 2 ** power;
    if (scaled >= 1) return `${scaled.toFixed(scaled >= 100 ? 0 : 1)} ${unit}`;
  }
  return `${value} B`;
}

// 45 s, 3 min 20 s, 5 h 12 min, 3 d 4 h.
export function duration(seconds) {
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = units.findIndex(([, size]) => seconds >= size);
  if (first < 0) return "0 s";
  const [name, size] = units[first];
  const head = `${Math.floor(seconds / size)} ${name}`;
  if (first === units.length - 1) return head;
  const [next, smaller] = units[first + 1];
  return `${head} ${Math.floor((seconds % size) / smaller)} ${next}`;
}

export const byId = (id) => document.getElementById(id);

// Sets a text only where it differs: whoever reads it aloud is not told again.
export function setText(element, text) {
  if (element.textContent !== String(text)) element.textContent = text;
}

// An element with a class, and children: elements, or text that stays text.
export function make(tag, className = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}
