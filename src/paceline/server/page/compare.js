// Comparison of two replies: text and speed.

/** Compares two finished replies, with and without speculation: {same, head, rest}, and `at`, the first difference. */
export function verdict(on, off, { fair, guarantee }) {
  const [one, other] = [on.trace, off.trace];
  const at = firstDifference(one, other);
  const shorter = Math.min(one.length, other.length);
  if (at === shorter && one.length === other.length) {
    return { same: true, head: "Same text, token for token.", rest: `${count(at)}. ${speed(on, off, fair)}` };
  }
  if (at === shorter && !(on.finish && off.finish)) {
    return { same: true, head: "Same text up to the end of the shorter reply.", rest: `${count(at)}, then one reply was stopped.` };
  }
  const reason = guarantee === "bits"
    ? "This should not happen: please report it."
    : "This can happen: on this machine, the model is exact up to rounding only.";
  return { same: false, at, head: `The texts differ from token ${at + 1} on.`, rest: reason };
}

function firstDifference(one, other) {
  const same = (a, b) => a && b && a.id === b.id && a.text === b.text;
  let at = 0;
  while (same(one[at], other[at])) at += 1;
  return at;
}

const count = (n) => (n === 1 ? "1 token" : `${n} tokens`);

function speed(on, off, fair) {
  if (!on.rate || !off.rate) return "";
  const times = `With speculation ${(on.rate / off.rate).toFixed(2)} times the tokens per second`;
  return fair ? `${times}.` : `${times}, but the replies shared the machine. For fair timing, let them run one after the other.`;
}
