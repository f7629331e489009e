// The bipartite view: two columns of tokens, and a line for each attention weight.

import { fitted, shortened, textWidth } from "./dom.js";
import { palette } from "./colour.js";
import { newSvg } from "./save.js";

const ROW = 27;
const TOP = 30;
const FAINT = 0.015; // weights below this are not drawn, unless their token is hovered

// Draw a matrix (queries, keys). `left` and `right` are {title, labels}; `queriesLeft` is true if the queries are on
// the left. Returns {node, mark(query, key)}.
export function bipartite(matrix, { left, right, queriesLeft, width, label, onhover }) {
  const colours = palette();
  const rows = Math.max(left.labels.length, right.labels.length);
  const wide = (labels) => Math.ceil(Math.max(40, ...labels.map((text) => textWidth(shortened(text), 14)))) + 10;
  const full = Math.max(280, Math.min(640, width));
  const edges = [Math.min(wide(left.labels), full * 0.36), full - Math.min(wide(right.labels), full * 0.36)];
  const svg = newSvg(full, TOP + rows * ROW + 6, label);
  const tall = (labels, i) => TOP + ((rows - labels.length) * ROW) / 2 + i * ROW + ROW / 2;
  const lines = [];
  const [T, S] = matrix.shape;
  for (let t = 0; t < T; t++) for (let s = 0; s < S; s++) lines.push({ t, s, weight: matrix.get(t, s) });
  const drawn = svg.append("g").attr("fill", "none").attr("stroke", colours.accent).attr("stroke-linecap", "round");
  const curve = ({ t, s }) => {
    const [from, to] = queriesLeft ? [t, s] : [s, t];
    const [x1, x2] = [edges[0] + 6, edges[1] - 6];
    const [y1, y2, middle] = [tall(left.labels, from), tall(right.labels, to), (edges[0] + edges[1]) / 2];
    return `M${x1},${y1}C${middle},${y1} ${middle},${y2} ${x2},${y2}`;
  };
  const paths = drawn.selectAll("path").data(lines).join("path").attr("d", curve);
  svg
    .append("g")
    .attr("font-size", 11.5)
    .attr("fill", colours.muted)
    .selectAll("text")
    .data([left, right])
    .join("text")
    .attr("x", (side, i) =>
      i
        ? Math.min(edges[1], full - textWidth(side.title, 11.5) - 2)
        : Math.max(edges[0], textWidth(side.title, 11.5) + 2),
    )
    .attr("y", 12)
    .attr("text-anchor", (_, i) => (i ? "start" : "end"))
    .text((side) => side.title);
  const texts = [left, right].map((side, i) =>
    column(svg, side.labels, [edges[i], i ? full - edges[i] : edges[i]], i, tall, colours),
  );
  const weights = svg.append("g").attr("font-size", 11).attr("fill", colours.accent).attr("pointer-events", "none");
  const mark = (query, key) => {
    const chosen = (line) => (query === null || line.t === query) && (key === null || line.s === key);
    const some = query !== null || key !== null;
    paths.attr("stroke-width", (line) => (some && chosen(line) ? 0.8 + 3.2 * line.weight : 0.4 + 2.8 * line.weight));
    paths.attr("opacity", (line) => {
      if (!some) return line.weight < FAINT ? 0 : Math.min(1, line.weight ** 0.8);
      return chosen(line) ? Math.min(1, 0.1 + line.weight ** 0.7) : 0.04 * line.weight;
    });
    const [onLeft, onRight] = queriesLeft ? [query, key] : [key, query];
    texts[0].attr("font-weight", (_, i) => (i === onLeft ? 650 : 400));
    texts[1].attr("font-weight", (_, i) => (i === onRight ? 650 : 400));
    const noted = some ? lines.filter((line) => chosen(line) && line.weight >= 0.01) : [];
    const oneSide = (query === null) !== (key === null);
    weights
      .selectAll("text")
      .data(oneSide ? noted : noted.slice(0, 1))
      .join("text")
      .text((line) => line.weight.toFixed(2))
      .attr("text-anchor", (line) => (atLeft(line) ? "start" : "end"))
      .attr("dy", "-0.25em")
      .attr("x", (line) => (atLeft(line) ? edges[0] + 8 : edges[1] - 8))
      .attr("y", (line) =>
        atLeft(line)
          ? tall(left.labels, queriesLeft ? line.t : line.s)
          : tall(right.labels, queriesLeft ? line.s : line.t),
      );
    function atLeft() {
      return (query !== null) !== queriesLeft;
    }
  };
  texts.forEach((text, i) => {
    const query = queriesLeft === (i === 0);
    const enter = (_, datum) => onhover(query ? [datum.at, null] : [null, datum.at]);
    text
      .on("pointerenter", enter)
      .on("pointerdown", enter)
      .on("pointerleave", () => onhover(null));
  });
  mark(null, null);
  return { node: svg.node(), mark };
}

function column(svg, labels, [x, room], side, tall, colours) {
  const data = labels.map((text, at) => ({ text: fitted(shortened(text), room - 2, 14), at }));
  const group = svg.append("g").attr("font-size", 14).attr("fill", colours.text);
  return group
    .selectAll("text")
    .data(data)
    .join("text")
    .text((each) => each.text)
    .attr("x", x)
    .attr("y", (each) => tall(labels, each.at))
    .attr("dy", "0.35em")
    .attr("text-anchor", side ? "start" : "end")
    .attr("cursor", "default");
}
