// The attention view: a grid of all heads, and one head in detail with its switch and its factor.

import { bipartite } from "./bipartite.js";
import { palette, pixels, ramp } from "./colour.js";
import { el, region, segments } from "./dom.js";
import { plural } from "./format.js";
import { kindName, kindsOf, selection, sides } from "./kinds.js";
import { heatmap } from "./matrix.js";
import { figure, newSvg } from "./save.js";
import { changedHeads, withFactor } from "./store.js";

export function attentionView(node, panel) {
  const chosen = selection(panel.result, panel.state);
  if (!chosen) {
    region(node, "none", () => el("p", { class: "empty" }, "This model has no attention weights to show."));
    return;
  }
  if (node.dataset.built !== "attention")
    region(node, "attention", () => [
      el("div", { class: "controls" }),
      el("div", { class: "split" }, el("div", { class: "heads" }), el("div", {}, el("div", { class: "head" }), el("div", { class: "picture" }))),
    ]);
  const [controls, split] = node.children;
  const { state, result, theme } = panel;
  const { kind, layer, head } = chosen;
  region(controls, JSON.stringify([result.serial, kind, state.unit]), () => controlsOf(panel, chosen));
  const factors = state.heads[panel.index][kind] ?? {};
  const gridKey = [result.serial, kind, layer, head, factors, theme];
  region(split.children[0], JSON.stringify(gridKey), () => headGrid(panel, chosen, factors));
  const detail = split.children[1];
  region(detail.children[0], JSON.stringify([kind, layer, head, state.view, result.model]), () => headControls(panel, chosen));
  refreshControls(detail.children[0], factors[`${layer}.${head}`] ?? 1);
  const width = Math.round(detail.clientWidth);
  const key = [result.serial, kind, layer, head, state.unit, state.view, width, theme];
  region(detail.children[1], JSON.stringify(key), () => picture(panel, chosen, width));
}

function controlsOf(panel, { kind }) {
  const kinds = kindsOf(panel.result).map((each) => [each, kindName(each)]);
  const units = [["subwords", "Subwords"], ["words", "Words"]];
  return [
    segments("Kind of attention", kinds, kind, (next) => panel.update({ kind: next, layer: null, head: 0 }), "kind"),
    segments("Unit", units, panel.state.unit, (unit) => panel.update({ unit }), "unit"),
  ];
}

function setFactor(panel, kind, at, factor) {
  const heads = [...panel.state.heads];
  heads[panel.index] = withFactor(heads[panel.index], kind, at, factor);
  panel.update({ heads });
}

function headGrid(panel, chosen, factors) {
  const { kind, layers } = chosen;
  const most = Math.max(...layers.map((each) => each.shape[0]));
  const colourOf = ramp(palette());
  const toggle = (at) => panel.offline || setFactor(panel, kind, at, (factors[at] ?? 1) === 0 ? 1 : 0);
  const rows = layers.map((tensor, layer) => {
    const cells = Array.from({ length: tensor.shape[0] }, (_, head) =>
      headCell(panel, chosen, { layer, head, factor: factors[`${layer}.${head}`] ?? 1, matrix: tensor.at(head), colourOf, toggle }),
    );
    return el("div", { role: "row", class: "row" }, el("span", { role: "rowheader", class: "layer" }, String(layer + 1)), cells);
  });
  const grid = el("div", { role: "grid", class: "grid", "aria-label": `${kindName(kind)}: a row for each layer, a column for each head` }, rows);
  grid.style.setProperty("--heads", most);
  grid.addEventListener("keydown", (event) => gridKey(event, panel, chosen, toggle));
  const changed = changedHeads(panel.state.heads[panel.index]);
  const reset = el("button", { type: "button", class: "quiet", "data-key": "reset", onclick: () => resetHeads(panel) }, "Switch all on");
  const note = changed ? `${plural(changed, "head")} changed.` : panel.offline ? "" : "Arrow keys move; O switches a head off.";
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
      "aria-label": `Layer ${layer + 1}, head ${head + 1}, ${status}`,
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
    "aria-label": `Layer ${layer + 1}, head ${head + 1}`,
    "data-switch": at,
    disabled: panel.offline,
    onclick: () => toggle(at),
  });
  const label = el("span", { class: "number" }, factor === 0 || factor === 1 ? String(head + 1) : `×${factor}`);
  const cell = { role: "gridcell", class: `cell${factor === 0 ? " off" : ""}${selected ? " selected" : ""}`, "aria-selected": String(selected) };
  return el("div", cell, thumb, el("div", { class: "under" }, label, control));
}

function gridKey(event, panel, { kind, layers, layer, head }, toggle) {
  const moves = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0], Home: [0, -head], End: [0, 99] };
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
  return figure(title, "Rows are layers, columns are heads. A darker cell is a higher weight.", name, grid, () => gridPicture(chosen));
}

// The grid as one SVG.
function gridPicture({ kind, layers }) {
  const colours = palette();
  const [size, gap, left, top] = [96, 10, 24, 24];
  const most = Math.max(...layers.map((each) => each.shape[0]));
  const svg = newSvg(left + most * (size + gap), top + layers.length * (size + gap), kindName(kind));
  const label = (text, x, y) =>
    svg.append("text").attr("x", x).attr("y", y).attr("text-anchor", "middle").attr("fill", colours.muted).attr("font-size", 12).text(text);
  for (let head = 0; head < most; head++) label(String(head + 1), left + head * (size + gap) + size / 2, 14);
  layers.forEach((tensor, layer) => {
    label(String(layer + 1), 8, top + layer * (size + gap) + size / 2);
    for (let head = 0; head < tensor.shape[0]; head++)
      svg.append("image").attr("href", pixels(tensor.at(head), ramp(colours)).toDataURL()).attr("width", size).attr("height", size)
        .attr("x", left + head * (size + gap)).attr("y", top + layer * (size + gap)).attr("preserveAspectRatio", "none")
        .attr("image-rendering", "pixelated");
  });
  return svg.node();
}

function headControls(panel, { kind, layer, head }) {
  const at = `${layer}.${head}`;
  const id = `factor-${panel.index}`;
  const change = (event) => setFactor(panel, kind, at, Number(event.currentTarget.value));
  const off = (event) => setFactor(panel, kind, at, event.currentTarget.getAttribute("aria-checked") === "true" ? 0 : 1);
  const views = [["bipartite", "Lines"], ["matrix", "Matrix"]];
  const viewSegments = el("div", { class: "views" });
  viewSegments.append(segments("Picture", views, panel.state.view, (view) => panel.update({ view }), "view"));
  return [
    el(
      "div",
      { class: "factor" },
      el("button", { type: "button", class: "switch", role: "switch", "data-key": "off", "aria-label": "This head is on", disabled: panel.offline, onclick: off }),
      el("label", { for: id }, "Weight of the head"),
      el("input", { id, type: "range", min: 0, max: 2, step: 0.05, "data-key": "factor", disabled: panel.offline, oninput: change }),
      el("output", { for: id }),
    ),
    viewSegments,
  ];
}

function refreshControls(node, factor) {
  const input = node.querySelector("input");
  if (document.activeElement !== input || Number(input.value) !== factor) input.value = factor;
  node.querySelector("output").textContent = `× ${factor.toFixed(2)}`;
  node.querySelector("[data-key=off]").setAttribute("aria-checked", String(factor !== 0));
}

function picture(panel, { kind, layers, layer, head }, width) {
  const { result, state, hover } = panel;
  const own = sides(result, kind, layers[layer].at(head), state.unit);
  const title = `${kindName(kind)}, layer ${layer + 1}, head ${head + 1}`;
  const onhover = (at) => {
    if (!at) hover.set(null);
    else hover.set(at[0] !== null ? own.queryAt(at[0]) : own.keyAt(at[1]), at[0] !== null && at[1] !== null ? own.keyAt(at[1]) : null);
  };
  const cross = kind.endsWith(".cross");
  const query = { title: own.queryTitle, labels: own.queries };
  const key = { title: own.keyTitle, labels: own.keys };
  const drawn =
    state.view === "matrix"
      ? heatmap(own.matrix, { rows: own.queries, columns: own.keys, label: title, width, onhover })
      : bipartite(own.matrix, { left: cross ? key : query, right: cross ? query : key, queriesLeft: !cross, width, label: title, onhover });
  const value = el("p", { class: "note value", "aria-live": "polite" });
  const idle = state.view === "matrix" ? `Rows: ${own.queryTitle}. Columns: ${cross ? "source" : "attended token"}.` : "Point at a token to see its weights.";
  const follow = (first, second) => {
    const query = own.queryOf(first) ?? own.queryOf(second);
    const key = own.keyOf(second) ?? own.keyOf(first);
    const both = query !== null && key !== null;
    drawn.mark(query, both || query === null ? key : null);
    value.textContent = both ? `${own.queries[query]} → ${own.keys[key]}: ${own.matrix.get(query, key).toFixed(4)}` : idle;
  };
  hover.listen("picture", follow);
  follow(null, null);
  return [figure(title, null, `attention-${kind}-${layer + 1}-${head + 1}`, drawn.node), value];
}
