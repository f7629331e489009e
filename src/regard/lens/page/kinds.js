// Kinds of attention: their names, and the tokens of their rows and columns.

import { shown } from "./format.js";
import { betweenWords, wordsOf } from "./tensors.js";

const NAMES = {
  "decoder.cross": "Cross-attention",
  "encoder.self": "Encoder",
  "decoder.self": "Decoder",
  "encoder.mixtures": "Encoder (mixtures)",
};
const ORDER = ["decoder.cross", "encoder.self", "decoder.self", "encoder.mixtures"];

export function kindName(kind) {
  return NAMES[kind] ?? kind;
}

export function kindsOf(result) {
  const known = ORDER.filter((kind) => kind in result.attention);
  return [...known, ...Object.keys(result.attention).filter((kind) => !ORDER.includes(kind))];
}

// The chosen kind, layer and head, or the nearest that this result has. None is chosen at first: the last layer.
export function selection(result, state) {
  const kinds = kindsOf(result);
  if (!kinds.length) return null;
  const kind = kinds.includes(state.kind) ? state.kind : kinds[0];
  const layers = result.attention[kind];
  const layer = Math.min(state.layer ?? layers.length - 1, layers.length - 1);
  const head = Math.min(Math.max(0, state.head), layers[layer].shape[0] - 1);
  return { kind, layers, layer, head };
}

// Rows and columns of a kind: {matrix, queries, keys, queryTitle, keyTitle, queryAt, keyAt}. `queryAt(i)` is the hover
// target [side, from, to] of row i. In cross-attention a row is named after the token that it writes.
export function sides(result, kind, matrix, unit) {
  const [T, S] = matrix.shape;
  const cross = kind.endsWith(".cross");
  const side = kind.split(".")[0];
  const rowTokens = cross ? writtenBy(result, T) : result.tokens[side];
  const keySide = cross ? "encoder" : side;
  const keyTokens = result.tokens[keySide];
  const queries = groups(rowTokens, T, unit);
  const keys = groups(kind.endsWith(".mixtures") ? [] : keyTokens, S, unit);
  const whole = unit === "words" ? betweenWords(matrix, queries, keys) : matrix;
  return {
    matrix: whole,
    queries: queries.map((each) => each.text),
    keys: keys.map((each) => each.text),
    queryTitle: cross ? "token that is written" : "token",
    keyTitle: cross ? "source" : kind.endsWith(".mixtures") ? "mixture" : "attends to",
    queryAt: (i) => ({ side: cross ? "decoder" : side, from: queries[i].from, to: queries[i].to }),
    keyAt: (j) => ({ side: keySide, from: keys[j].from, to: keys[j].to, key: true }),
    queryOf: (hover) =>
      placeOf(queries, hover, cross ? "decoder" : side, cross || side !== "decoder" ? undefined : false),
    keyOf: (hover) => placeOf(keys, hover, keySide, keySide === side && !cross ? true : undefined),
  };
}

// The tokens that the decoder positions write. An output that was cut has none at its end.
function writtenBy(result, count) {
  const tokens = result.tokens.output;
  return tokens.length === count - 1 ? [...tokens, { text: "…", word: Infinity }] : tokens;
}

function groups(tokens, count, unit) {
  if (!tokens || tokens.length < count)
    return Array.from({ length: count }, (_, i) => ({ text: String(i + 1), from: i, to: i + 1 }));
  const used = tokens.slice(0, count);
  if (unit === "words") return wordsOf(used, shown);
  return used.map((token, at) => ({ text: shown(token), from: at, to: at + 1 }));
}

function placeOf(all, hover, side, key) {
  if (!hover || hover.side !== side || (key !== undefined && Boolean(hover.key) !== key)) return null;
  const at = all.findIndex((each) => each.from <= hover.from && hover.from < each.to);
  return at < 0 ? null : at;
}
