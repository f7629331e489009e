// Position encodings and biases as heat maps.

import { el, region, segments } from "./dom.js";
import { palette, signedRamp } from "./colour.js";
import { heatmap } from "./matrix.js";
import { figure } from "./save.js";

const WHAT = {
  Rotary:
    "Rotary: queries and keys are rotated by these angles. Columns: cosines, then sines, of each pair of channels.",
  Sinusoidal: "Sinusoids that are added to the embeddings. Rows: positions. Columns: channels.",
  Learned: "Learned vectors that are added to the embeddings. Rows: positions. Columns: channels.",
  Shaw: "Vectors for the distance from query to key. Rows: distances. Columns: channels.",
};

export function positionsView(node, panel) {
  const { result, state, theme } = panel;
  const all = result.positions;
  if (!all.length) {
    region(node, "none", () =>
      el(
        "p",
        { class: "empty" },
        "This model has no position encoding: the order of the tokens comes from its recurrence, its convolutions or its masks.",
      ),
    );
    return;
  }
  const chosen = Math.min(state.scheme, all.length - 1);
  const width = Math.round(node.clientWidth);
  region(node, JSON.stringify([result.serial, chosen, state.head, theme, width]), () => {
    const options = all.map((each, i) => [i, `${each.scheme} · ${each.module}`]);
    return [
      all.length > 1
        ? el(
            "div",
            { class: "controls" },
            segments("Position scheme", options, chosen, (scheme) => panel.update({ scheme }), "scheme"),
          )
        : null,
      pictures(all[chosen], panel, width),
    ];
  });
}

function pictures(scheme, panel, width) {
  const half = width > 820 ? width / 2 - 24 : width;
  const parts = [];
  if (scheme.vectors)
    parts.push(
      map(
        scheme.vectors,
        scheme.scheme === "Rotary" ? "Rotary angles" : `${scheme.scheme} vectors`,
        WHAT[scheme.scheme] ?? "Rows: positions. Columns: channels.",
        half,
      ),
    );
  if (scheme.similarity)
    parts.push(
      map(scheme.similarity, `${scheme.scheme} similarity`, "The product of the vectors of two positions.", half),
    );
  if (scheme.bias) parts.push(...biases(scheme, panel, half));
  return el("div", { class: "pair" }, parts);
}

function biases(scheme, panel, half) {
  const heads = scheme.bias.shape[0];
  const head = Math.min(panel.state.head, heads - 1);
  const options = Array.from({ length: heads }, (_, i) => [i, String(i)]);
  const choice =
    heads > 1
      ? el(
          "div",
          { class: "controls" },
          el("span", { class: "note" }, "Head"),
          segments("Head", options, head, (next) => panel.update({ head: next }), "bias"),
        )
      : null;
  const title = `${scheme.scheme} bias${heads > 1 ? `, head ${head}` : ""}`;
  return [
    el(
      "div",
      {},
      choice,
      map(scheme.bias.at(head), title, "Added to the attention scores. Rows: queries. Columns: keys.", half),
    ),
  ];
}

function map(matrix, title, note, width) {
  const [rows, columns] = matrix.shape;
  const most = matrix.values.reduce((high, x) => Math.max(high, Math.abs(x)), 1e-9);
  const scale = signedRamp(palette());
  const numbers = (count) => Array.from({ length: count }, (_, i) => String(i));
  const value = el("p", { class: "note value", "aria-live": "polite" });
  const cell = Math.max(1.5, Math.min(14, (width - 44) / columns));
  const idle = `Colours range from −${most.toPrecision(3)} (grey) to ${most.toPrecision(3)}.`;
  value.textContent = idle;
  const drawn = heatmap(matrix, {
    rows: numbers(rows),
    columns: numbers(columns),
    label: title,
    every: 8,
    everyRow: 8,
    width,
    cell,
    height: Math.max(6, Math.min(14, cell)),
    colourOf: (x) => scale(x / most),
    onhover: (at) => {
      const inside = at && at[0] !== null && at[1] !== null;
      value.textContent = inside ? `${at[0]}, ${at[1]}: ${matrix.get(at[0], at[1]).toPrecision(4)}` : idle;
    },
  });
  return el("div", {}, figure(title, note, title.toLowerCase().replaceAll(/[^a-z0-9]+/g, "-"), drawn.node), value);
}
