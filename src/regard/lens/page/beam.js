// The tree of all hypotheses that the beam search considered.

import { el, region, shortened, textWidth } from "./dom.js";
import { palette } from "./colour.js";
import { decimal, percent, shown } from "./format.js";
import { figure, newSvg } from "./save.js";

const ROW = 24;

export function beamView(node, panel) {
  const { result, theme } = panel;
  if (!result.tree?.length) {
    region(node, "none", () => el("p", { class: "empty" }, "This output was not searched: there is no tree to show."));
    return;
  }
  region(node, JSON.stringify([result.serial, theme]), () => [
    figure("Beam search", note(result), "beam-search", tree(result)),
    table(result),
  ]);
}

function note(result) {
  return `Each column is a step. The accent colour marks the output, a ring a hypothesis that ended, grey a beam that was dropped. Beam size ${result.beam}.`;
}

function tree(result) {
  const colours = palette();
  const nodes = result.tree.map((each, at) => ({
    ...each,
    at,
    name: each.parent === null ? "start" : shortened(shown(each), 20),
  }));
  const root = d3
    .stratify()
    .id((each) => each.at)
    .parentId((each) => each.parent)(nodes);
  root.sort((a, b) => Number(b.data.best) - Number(a.data.best) || b.data.log_prob - a.data.log_prob);
  let rows = 0; // a node is in the row of its first child, so the output is a straight line at the top
  root.eachAfter((each) => (each.x = each.children ? each.children[0].x : ROW * rows++));
  const widths = [];
  root.each((each) => (widths[each.depth] = Math.max(widths[each.depth] ?? 0, nameWidth(each) + 44)));
  const starts = widths.map((_, depth) => widths.slice(0, depth).reduce((sum, each) => sum + each, 8));
  const total = starts.at(-1) + widths.at(-1) + 60;
  const svg = newSvg(Math.ceil(total), ROW * (rows + 1), "Tree of the beam search");
  const x = (each) => starts[each.depth];
  const y = (each) => each.x + ROW;
  const end = (each) => x(each) + 12 + nameWidth(each) + 4;
  const links = svg.append("g").attr("fill", "none").selectAll("path").data(root.links()).join("path");
  links.attr("d", ({ source, target }) => {
    const [x1, x2, y1, y2] = [end(source), x(target) - 2, y(source), y(target)];
    const middle = (x1 + x2) / 2;
    return `M${x1},${y1}C${middle},${y1} ${middle},${y2} ${x2},${y2}`;
  });
  const colour = (each) =>
    each.data.best ? colours.accent : each.children || each.data.ended ? colours.muted : colours.line;
  links
    .attr("stroke", ({ target }) => colour(target))
    .attr("stroke-width", ({ target }) => 0.8 + 3 * Math.sqrt(target.data.probability));
  const groups = svg
    .append("g")
    .selectAll("g")
    .data(root.descendants())
    .join("g")
    .attr("transform", (each) => `translate(${x(each)},${y(each)})`);
  groups
    .append("circle")
    .attr("cx", 4)
    .attr("r", 3.5)
    .attr("fill", (each) => (each.data.ended ? colours.surface : colour(each)))
    .attr("stroke", colour)
    .attr("stroke-width", 1.5);
  groups
    .append("text")
    .attr("x", 12)
    .attr("dy", "0.35em")
    .text((each) => each.data.name)
    .attr("fill", (each) =>
      each.data.best ? colours.accent : each.children || each.data.ended ? colours.text : colours.muted,
    )
    .attr("font-weight", (each) => (each.data.best ? 600 : 400));
  groups
    .filter((each) => each.data.ended)
    .append("text")
    .attr("x", (each) => 12 + nameWidth(each) + 8)
    .attr("dy", "0.35em")
    .attr("fill", colours.muted)
    .attr("font-size", 11)
    .text((each) => decimal(each.data.score));
  groups.append("title").text((each) => describe(each));
  return svg.node();
}

function nameWidth({ data }) {
  return textWidth(data.name, 13) * (data.best ? 1.1 : 1); // the output is bold
}

function describe({ data }) {
  if (data.parent === null) return "The start of every hypothesis";
  return `${data.name}: probability ${percent(data.probability)}, log p so far ${decimal(data.log_prob)}, score ${decimal(data.score)}`;
}

function table(result) {
  const rows = result.hypotheses.map((each, rank) =>
    el(
      "tr",
      { class: rank ? "" : "best" },
      el("td", { class: "p" }, decimal(each.score)),
      el("td", { class: "p" }, decimal(each.log_prob)),
      el("td", {}, each.text || "(empty)", each.ended ? null : el("i", {}, " (cut at the length limit)")),
    ),
  );
  const head = el(
    "tr",
    {},
    ["score", "log p", "hypothesis"].map((name) => el("th", { scope: "col" }, name)),
  );
  return el(
    "table",
    { class: "hypotheses" },
    el("caption", {}, "Hypotheses that ended, best first"),
    el("thead", {}, head),
    el("tbody", {}, rows),
  );
}
