// The grid of all heads of one kind of attention: a row for each layer, a column for each head.

import { palette, pixels, ramp } from "./colour.js";
import { el } from "./dom.js";
import { plural } from "./format.js";
import { kindName } from "./kinds.js";
import { figure, newSvg } from "./save.js";
import { changedHeads, withFactor } from "./store.js";

export function setFactor(panel, kind, at, factor) {
  const heads = [...panel.state.heads];
  heads[panel.index] = withFactor(heads[panel.index], kind, at, factor);
  panel.update({ heads });
}

export function headGrid(panel, chosen, factors) {
  const { kind, layers } = chosen;
  const most = Math.max(...layers.map((each) => each.shape[0]));
  const colourOf = ramp(palette());
  const toggle = (at) => panel.offline || setFactor(panel, kind, at, (factors[at] ?? 1) === 0 ? 1 : 0);
  const rows = layers.map((tensor, layer) => {
    const cells = Array.from({ length: tensor.shape[0] }, (_, head) =>
      headCell(panel, chosen, {
        layer,
        head,
        factor: factors[`${layer}.${head}`] ?? 1,
        matrix: tensor.at(head),
        colourOf,
        toggle,
      }),
    );
    return el(
      "div",
      { role: "row", class: "row" },
      el("span", { role: "rowheader", class: "layer" }, String(layer)),
      cells,
    );
  });
  const grid = el(
    "div",
    { role: "grid", class: "grid", "aria-label": `${kindName(kind)}: a row for each layer, a column for each head` },
    rows,
  );
  grid.style.setProperty("--heads", most);
  grid.addEventListener("keydown", (event) => gridKey(event, panel, chosen, toggle));
  const changed = changedHeads(panel.state.heads[panel.index]);
  const reset = el(
    "button",
    { type: "button", class: "quiet", "data-key": "reset", onclick: () => resetHeads(panel) },
    "Switch all on",
  );
  const note = changed
    ? `${plural(changed, "head")} changed.`
    : panel.offline
      ? ""
      : "Arrow keys move; O switches a head off.";
  return [
    figureOfGrid(panel, chosen, grid),
    el("p", { class: "note under" }, note, " ", changed && !panel.offline ? reset : null),
  ];
}

function resetHeads(panel) {
  const heads = [...panel.state.heads];
  heads[panel.index] = {};
  panel.update({ heads });
}

function headCell(panel, chosen, { layer, head, factor, matrix, colourOf, toggle }) {
  const at = `${layer}.${head}`;
  const selected = layer === chosen.layer && head === chosen.head;
  const canvas = pixels(matrix, colourOf);
  canvas.setAttribute("aria-hidden", "true");
  const status = factor === 0 ? "off" : factor === 1 ? "on" : `times ${factor}`;
  const thumb = el(
    "button",
    {
      type: "button",
      class: "thumb",
      tabindex: selected ? 0 : -1,
      "aria-label": `Layer ${layer}, head ${head}, ${status}`,
      "data-key": `head:${at}`,
      onclick: () => panel.update({ kind: chosen.kind, layer, head }),
    },
    canvas,
  );
  const control = el("button", {
    type: "button",
    class: "switch",
    role: "switch",
    tabindex: -1,
    "aria-checked": String(factor !== 0),
    "aria-label": `Layer ${layer}, head ${head}`,
    "data-switch": at,
    disabled: panel.offline,
    onclick: () => toggle(at),
  });
  const label = el("span", { class: "number" }, factor === 0 || factor === 1 ? String(head) : `×${factor}`);
  const cell = {
    role: "gridcell",
    class: `cell${factor === 0 ? " off" : ""}${selected ? " selected" : ""}`,
    "aria-selected": String(selected),
  };
  return el("div", cell, thumb, el("div", { class: "under" }, label, control));
}

function gridKey(event, panel, { kind, layers, layer, head }, toggle) {
  const moves = {
    ArrowRight: [0, 1],
    ArrowLeft: [0, -1],
    ArrowDown: [1, 0],
    ArrowUp: [-1, 0],
    Home: [0, -head],
    End: [0, 99],
  };
  if (event.key.toLowerCase() === "o" && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    toggle(`${layer}.${head}`);
  }
  const move = moves[event.key];
  if (!move) return;
  event.preventDefault();
  const next = Math.max(0, Math.min(layers.length - 1, layer + move[0]));
  const other = Math.max(0, Math.min(layers[next].shape[0] - 1, head + move[1]));
  const button = event.currentTarget.querySelector(`[data-key="head:${next}.${other}"]`);
  button?.focus();
  panel.update({ kind, layer: next, head: other });
}

function figureOfGrid(panel, chosen, grid) {
  const title = `${kindName(chosen.kind)}, all heads`;
  const name = `heads-${chosen.kind}`;
  return figure(title, "Rows are layers, columns are heads. A darker cell is a higher weight.", name, grid, () =>
    gridPicture(chosen),
  );
}

// The grid as one SVG.
function gridPicture({ kind, layers }) {
  const colours = palette();
  const [size, gap, left, top] = [96, 10, 24, 24];
  const most = Math.max(...layers.map((each) => each.shape[0]));
  const svg = newSvg(left + most * (size + gap), top + layers.length * (size + gap), kindName(kind));
  const label = (text, x, y) =>
    svg
      .append("text")
      .attr("x", x)
      .attr("y", y)
      .attr("text-anchor", "middle")
      .attr("fill", colours.muted)
      .attr("font-size", 12)
      .text(text);
  for (let head = 0; head < most; head++) label(String(head), left + head * (size + gap) + size / 2, 14);
  layers.forEach((tensor, layer) => {
    label(String(layer), 8, top + layer * (size + gap) + size / 2);
    for (let head = 0; head < tensor.shape[0]; head++)
      svg
        .append("image")
        .attr("href", pixels(tensor.at(head), ramp(colours)).toDataURL())
        .attr("width", size)
        .attr("height", size)
        .attr("x", left + head * (size + gap))
        .attr("y", top + layer * (size + gap))
        .attr("preserveAspectRatio", "none")
        .attr("image-rendering", "pixelated");
  });
  return svg.node();
}
