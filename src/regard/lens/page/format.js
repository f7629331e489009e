// Numbers and tokens as text.

export function percent(p) {
  if (p >= 0.9995) return "100 %";
  if (p < 0.0005) return p > 0 ? "< 0.1 %" : "0 %";
  return `${(100 * p).toFixed(1)} %`;
}

export function decimal(x, digits = 3) {
  if (x === null || x === undefined) return "−∞";
  const text = Math.abs(x).toFixed(digits);
  return x < 0 && Number(text) !== 0 ? `−${text}` : text;
}

export function signed(x, digits = 3) {
  return x < 0 || Number(x.toFixed(digits)) === 0 ? decimal(x, digits) : `+${decimal(x, digits)}`;
}

const SPECIAL = { "<s>": "start", "</s>": "end", "<pad>": "padding" };

// The text of a token for people: no sign for the space before it, and names for control tokens.
export function shown(token) {
  if (token.special) return SPECIAL[token.text] ?? token.text;
  const text = token.text.replaceAll("▁", " ").replaceAll("\\n", "↵").trim();
  return text === "" ? "␣" : text;
}

export function startsWithSpace(token) {
  return token.text.startsWith("▁");
}

// A sentence of the server, with a capital and a full stop.
export function sentence(text) {
  return `${text[0].toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`;
}

// The name of hidden state i: the input of the first layer, or the output of layer i - 1. Layers count from 0.
export function stateName(i) {
  return i ? `layer ${i - 1}` : "input";
}

export function plural(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}
