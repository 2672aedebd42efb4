// The vote over final answers. Knows texts only.

const NUMBER = /(?:(?<!\w)[-−])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?/g;

// The final answer of a text: its last number, or its last line; undefined where it has none.
export const FINAL = {
  number(text) {
    const last = [...text.matchAll(NUMBER)].at(-1)?.[0].replaceAll(",", "").replace("−", "-");
    if (last === undefined) return undefined;
    return last.replace(/^-?\d/, "").length < 15 ? String(Number(last)) : last; // 3.0 is 3
  },
  line: (text) => text.split("\n").map((line) => line.trim()).findLast((line) => line !== ""),
};

// [answer, how many have it], those with most first, then in the order in which they came.
export function tally(answers) {
  const counts = new Map();
  for (const answer of answers) if (answer !== undefined) counts.set(answer, (counts.get(answer) ?? 0) + 1);
  return [...counts].sort(([, one], [, other]) => other - one);
}
