// The attention view: a grid of all heads, and one head in detail with its switch and its factor.

import { bipartite } from "./bipartite.js";
import { el, region, segments } from "./dom.js";
import { headGrid, setFactor } from "./grid.js";
import { kindName, kindsOf, selection, sides } from "./kinds.js";
import { heatmap } from "./matrix.js";
import { figure } from "./save.js";

export function attentionView(node, panel) {
  const chosen = selection(panel.result, panel.state);
  if (!chosen) {
    region(node, "none", () => el("p", { class: "empty" }, "This model has no attention weights to show."));
    return;
  }
  if (node.dataset.built !== "attention")
    region(node, "attention", () => [
      el("div", { class: "controls" }),
      el(
        "div",
        { class: "split" },
        el("div", { class: "heads" }),
        el("div", {}, el("div", { class: "head" }), el("div", { class: "picture" })),
      ),
    ]);
  const [controls, split] = node.children;
  const { state, result, theme } = panel;
  const { kind, layer, head } = chosen;
  region(controls, JSON.stringify([result.serial, kind, state.unit]), () => controlsOf(panel, chosen));
  const factors = state.heads[panel.index][kind] ?? {};
  const gridKey = [result.serial, kind, layer, head, factors, theme];
  region(split.children[0], JSON.stringify(gridKey), () => headGrid(panel, chosen, factors));
  const detail = split.children[1];
  region(detail.children[0], JSON.stringify([kind, layer, head, state.view, result.model]), () =>
    headControls(panel, chosen),
  );
  refreshControls(detail.children[0], factors[`${layer}.${head}`] ?? 1);
  const width = Math.round(detail.clientWidth);
  const key = [result.serial, kind, layer, head, state.unit, state.view, width, theme];
  region(detail.children[1], JSON.stringify(key), () => picture(panel, chosen, width));
}

function controlsOf(panel, { kind }) {
  const kinds = kindsOf(panel.result).map((each) => [each, kindName(each)]);
  const units = [
    ["subwords", "Subwords"],
    ["words", "Words"],
  ];
  return [
    segments("Kind of attention", kinds, kind, (next) => panel.update({ kind: next, layer: null, head: 0 }), "kind"),
    segments("Unit", units, panel.state.unit, (unit) => panel.update({ unit }), "unit"),
  ];
}

function headControls(panel, { kind, layer, head }) {
  const at = `${layer}.${head}`;
  const id = `factor-${panel.index}`;
  const change = (event) => setFactor(panel, kind, at, Number(event.currentTarget.value));
  const off = (event) =>
    setFactor(panel, kind, at, event.currentTarget.getAttribute("aria-checked") === "true" ? 0 : 1);
  const views = [
    ["bipartite", "Lines"],
    ["matrix", "Matrix"],
  ];
  const viewSegments = el("div", { class: "views" });
  viewSegments.append(segments("Picture", views, panel.state.view, (view) => panel.update({ view }), "view"));
  return [
    el(
      "div",
      { class: "factor" },
      el("button", {
        type: "button",
        class: "switch",
        role: "switch",
        "data-key": "off",
        "aria-label": "This head is on",
        disabled: panel.offline,
        onclick: off,
      }),
      el("label", { for: id }, "Weight of the head"),
      el("input", {
        id,
        type: "range",
        min: 0,
        max: 2,
        step: 0.05,
        "data-key": "factor",
        disabled: panel.offline,
        oninput: change,
      }),
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
  const title = `${kindName(kind)}, layer ${layer}, head ${head}`;
  const onhover = (at) => {
    if (!at) hover.set(null);
    else
      hover.set(
        at[0] !== null ? own.queryAt(at[0]) : own.keyAt(at[1]),
        at[0] !== null && at[1] !== null ? own.keyAt(at[1]) : null,
      );
  };
  const cross = kind.endsWith(".cross");
  const query = { title: own.queryTitle, labels: own.queries };
  const key = { title: own.keyTitle, labels: own.keys };
  const drawn =
    state.view === "matrix"
      ? heatmap(own.matrix, { rows: own.queries, columns: own.keys, label: title, width, onhover })
      : bipartite(own.matrix, {
          left: cross ? key : query,
          right: cross ? query : key,
          queriesLeft: !cross,
          width,
          label: title,
          onhover,
        });
  const value = el("p", { class: "note value", "aria-live": "polite" });
  const idle =
    state.view === "matrix"
      ? `Rows: ${own.queryTitle}. Columns: ${cross ? "source" : own.keyTitle === "mixture" ? "mixture of all tokens" : "attended token"}.`
      : "Point at a token to see its weights.";
  const follow = (first, second) => {
    const query = own.queryOf(first) ?? own.queryOf(second);
    const key = own.keyOf(second) ?? own.keyOf(first);
    const both = query !== null && key !== null;
    drawn.mark(query, both || query === null ? key : null);
    value.textContent = both
      ? `${own.queries[query]} → ${own.keys[key]}: ${own.matrix.get(query, key).toFixed(4)}`
      : idle;
  };
  hover.listen("picture", follow);
  follow(null, null);
  return [figure(title, null, `attention-${kind}-${layer}-${head}`, drawn.node), value];
}
