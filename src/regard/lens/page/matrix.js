// Heat maps with labelled rows and columns.

import { FONT, shortened, textWidth } from "./dom.js";
import { inkOn, palette, pixels, ramp } from "./colour.js";
import { newSvg } from "./save.js";

const RECTANGLES = 6000; // matrices with more cells are drawn as one image

// Draw a matrix. `options`: rows and columns (labels), label, colourOf, size of a cell, text(i, j), onhover(i, j) or
// onhover(null), title(i, j). Returns {node, mark(row, column)}, where `mark` emphasises labels (or null for none).
export function heatmap(matrix, options) {
  const [T, S] = matrix.shape;
  const colours = palette();
  const colourOf = options.colourOf ?? ramp(colours);
  const rows = options.rows.map((text) => shortened(text, 24));
  const columns = options.columns.map((text) => shortened(text, 24));
  const left = Math.ceil(Math.max(8, ...rows.map((text) => textWidth(text, 12)))) + 10;
  const widest = Math.ceil(Math.max(8, ...columns.map((text) => textWidth(text, 12))));
  const room = Math.max(200, options.width ?? 480) - left - 8;
  const cell = options.cell ?? Math.max(options.least ?? 13, Math.min(34, room / S));
  const high = options.height ?? cell;
  const slanted = columns.some((text) => textWidth(text, 12) > cell * (options.every ?? 1) - 4);
  const top = slanted ? widest + 10 : 22;
  const width = Math.ceil(left + S * cell + (slanted ? 8 : 2));
  const svg = newSvg(width, Math.ceil(top + T * high + 2), options.label);
  drawCells(svg, matrix, { left, top, cell, high, colourOf, options, colours });
  const rowLabels = svg.append("g").attr("font-size", 12).attr("fill", colours.text).selectAll("text").data(rows);
  const place = (i) => top + i * high + high / 2;
  const rowText = rowLabels
    .join("text")
    .attr("x", left - 6)
    .attr("y", (_, i) => place(i))
    .attr("dy", "0.35em");
  rowText
    .attr("text-anchor", "end")
    .text((text, i) => (i % Math.max(options.everyRow ?? 1, Math.ceil(11 / high)) ? "" : text));
  const columnLabels = svg.append("g").attr("font-size", 12).attr("fill", colours.text).selectAll("text").data(columns);
  const across = (j) => left + j * cell + cell / 2;
  const columnText = columnLabels
    .join("text")
    .text((text, j) => (j % Math.max(options.every ?? 1, Math.ceil(11 / cell)) ? "" : text));
  if (slanted)
    columnText.attr("transform", (_, j) => `translate(${across(j)},${top - 6}) rotate(-90)`).attr("dy", "0.35em");
  else
    columnText
      .attr("x", (_, j) => across(j))
      .attr("y", top - 8)
      .attr("text-anchor", "middle");
  const cross = svg.append("g").attr("fill", "none").attr("stroke", colours.accent).attr("pointer-events", "none");
  const mark = (row, column) => {
    const strong = (at) => (_, i) => (i === at ? colours.accent : colours.text);
    rowText.attr("fill", strong(row)).attr("font-weight", (_, i) => (i === row ? 650 : 400));
    columnText.attr("fill", strong(column)).attr("font-weight", (_, j) => (j === column ? 650 : 400));
    cross.selectAll("*").remove();
    if (row !== null && row !== undefined && row < T)
      cross
        .append("rect")
        .attr("x", left)
        .attr("y", top + row * high)
        .attr("width", S * cell)
        .attr("height", high);
    if (column !== null && column !== undefined && column < S)
      cross
        .append("rect")
        .attr("x", left + column * cell)
        .attr("y", top)
        .attr("width", cell)
        .attr("height", T * high);
  };
  if (options.onhover) listen(svg, { left, top, cell, high, T, S }, options.onhover);
  return { node: svg.node(), mark };
}

function drawCells(svg, matrix, { left, top, cell, high, colourOf, options, colours }) {
  const [T, S] = matrix.shape;
  if (T * S > RECTANGLES) {
    const image = pixels(matrix, colourOf).toDataURL();
    svg
      .append("image")
      .attr("href", image)
      .attr("x", left)
      .attr("y", top)
      .attr("preserveAspectRatio", "none")
      .attr("width", S * cell)
      .attr("height", T * high)
      .attr("image-rendering", "pixelated");
    return;
  }
  const cells = [];
  for (let i = 0; i < T; i++) for (let j = 0; j < S; j++) cells.push([i, j]);
  const gap = Math.min(cell, high) > 12 ? 1 : 0;
  const drawn = svg
    .append("g")
    .attr("shape-rendering", gap ? null : "crispEdges")
    .selectAll("rect")
    .data(cells)
    .join("rect");
  drawn
    .attr("x", ([, j]) => left + j * cell)
    .attr("y", ([i]) => top + i * high)
    .attr("rx", gap ? 2 : 0);
  drawn
    .attr("width", cell - gap)
    .attr("height", high - gap)
    .attr("fill", ([i, j]) => colourOf(matrix.get(i, j)));
  if (!options.text) return;
  const words = svg.append("g").attr("font-size", 11).attr("font-family", FONT).attr("pointer-events", "none");
  words
    .selectAll("text")
    .data(cells)
    .join("text")
    .text(([i, j]) => options.text(i, j))
    .attr("text-anchor", "middle")
    .attr("x", ([, j]) => left + (j + 0.5) * cell)
    .attr("y", ([i]) => top + (i + 0.5) * high)
    .attr("dy", "0.35em")
    .attr("fill", ([i, j]) => inkOn(colourOf(matrix.get(i, j)), colours));
}

function listen(svg, { left, top, cell, high, T, S }, onhover) {
  const node = svg.node();
  const at = (event) => {
    const box = node.getBoundingClientRect();
    const scale = Number(node.getAttribute("width")) / box.width;
    const x = Math.floor(((event.clientX - box.left) * scale - left) / cell);
    const y = Math.floor(((event.clientY - box.top) * scale - top) / high);
    const row = y >= 0 && y < T ? y : null;
    const column = x >= 0 && x < S ? x : null;
    onhover(row === null && column === null ? null : [row, column]);
  };
  node.addEventListener("pointermove", at);
  node.addEventListener("pointerdown", at);
  node.addEventListener("pointerleave", () => onhover(null));
}
