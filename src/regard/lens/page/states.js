// Hidden states: their norms by layer and token, the states of one layer, and the routing to experts.

import { el, region, segments } from "./dom.js";
import { palette, ramp, signedRamp } from "./colour.js";
import { shown, stateName } from "./format.js";
import { heatmap } from "./matrix.js";
import { figure } from "./save.js";
import { Tensor } from "./tensors.js";

export function statesView(node, panel) {
  const { result, state, theme } = panel;
  const sides = Object.keys(result.states);
  if (!sides.length) {
    region(node, "none", () => el("p", { class: "empty" }, "No hidden states of this model were recorded."));
    return;
  }
  const side = sides.includes(state.side) ? state.side : sides.at(-1);
  const layers = result.states[side];
  const step = Math.min(state.step ?? layers.length - 1, layers.length - 1);
  const width = Math.round(node.clientWidth);
  region(node, JSON.stringify([result.serial, side, step, theme, width]), () => {
    const names = sides.map((each) => [each, each[0].toUpperCase() + each.slice(1)]);
    const steps = layers.map((_, i) => [i, i ? String(i - 1) : "input"]);
    return [
      el(
        "div",
        { class: "controls" },
        sides.length > 1
          ? segments("Side", names, side, (next) => panel.update({ side: next, step: null }), "side")
          : null,
        el("span", { class: "note" }, "Layer"),
        segments("Layer", steps, step, (next) => panel.update({ step: next }), "step"),
      ),
      el("div", { class: "pair" }, norms(result, side, width), stateMap(result, side, step, width)),
      routing(result, side, width),
    ];
  });
}

function tokensOf(result, side, count) {
  const tokens = result.tokens[side] ?? [];
  return Array.from({ length: count }, (_, i) => (i < tokens.length ? shown(tokens[i]) : String(i + 1)));
}

function norms(result, side, width) {
  const layers = result.norms[side];
  if (!layers) return null;
  const counts = layers.map((each) => each.shape[0]);
  const [rows, columns] = [layers.length, Math.max(...counts)];
  const values = new Float32Array(rows * columns);
  layers.forEach((each, i) => values.set(each.values, (rows - 1 - i) * columns));
  const matrix = new Tensor([rows, columns], values);
  const most = values.reduce((high, x) => Math.max(high, x), 1e-9);
  const scale = ramp(palette(), 1);
  const labels = layers.map((_, i) => stateName(rows - 1 - i));
  return described(
    matrix,
    { rows: labels, columns: tokensOf(result, side, columns), width: half(width), colourOf: (x) => scale(x / most) },
    "Norms of the hidden states",
    "The length of the vector of every token after every layer.",
    `norms-${side}`,
    `The longest is ${most.toPrecision(4)}.`,
  );
}

function stateMap(result, side, step, width) {
  const matrix = result.states[side][step];
  const most = matrix.values.reduce((high, x) => Math.max(high, Math.abs(x)), 1e-9);
  const scale = signedRamp(palette());
  const [rows, columns] = matrix.shape;
  const channels = Array.from({ length: columns }, (_, i) => String(i));
  return described(
    matrix,
    {
      rows: tokensOf(result, side, rows),
      columns: channels,
      width: half(width),
      height: 20,
      least: 1,
      every: columns > 64 ? 32 : 8,
      colourOf: (x) => scale(x / most),
    },
    `Hidden states, ${stateName(step)}`,
    "A row for each token, a column for each channel.",
    `states-${side}-${stateName(step).replace(" ", "-")}`,
    `Colours range from −${most.toPrecision(3)} (grey) to ${most.toPrecision(3)}.`,
  );
}

function half(width) {
  return width > 820 ? width / 2 - 24 : width;
}

function described(matrix, options, title, note, name, idle) {
  const value = el("p", { class: "note value", "aria-live": "polite" }, idle);
  const onhover = (at) => {
    const inside = at && at[0] !== null && at[1] !== null;
    value.textContent = inside
      ? `${options.rows[at[0]]}, ${options.columns[at[1]]}: ${matrix.get(at[0], at[1]).toPrecision(4)}`
      : idle;
    drawn.mark(inside ? at[0] : null, inside ? at[1] : null);
  };
  const drawn = heatmap(matrix, { ...options, label: title, onhover });
  return el("div", {}, figure(title, note, name, drawn.node), value);
}

function routing(result, side, width) {
  const parts = Object.entries(result.routing).filter(([name]) => name.startsWith(side));
  const maps = parts.flatMap(([name, layers]) =>
    layers.map((layer, i) => {
      const [rows, columns] = layer.shape;
      const experts = Array.from({ length: columns }, (_, e) => String(e));
      return described(
        layer,
        { rows: tokensOf(result, side, rows), columns: experts, width: half(width), colourOf: ramp(palette()) },
        `Routing, ${name}, layer ${i}`,
        "The weight of each expert (column) for each token (row).",
        `routing-${name}-${i}`,
        "",
      );
    }),
  );
  return maps.length ? el("div", { class: "pair later" }, maps) : null;
}
