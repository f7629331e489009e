// The logit lens: the tokens that each layer would write if it were the last.

import { el, region, shortened, textWidth } from "./dom.js";
import { inkOn, palette, ramp } from "./colour.js";
import { percent, sentence, shown, stateName } from "./format.js";
import { figure, newSvg } from "./save.js";

const ROW = 38;

export function layersView(node, panel) {
  const { result, theme } = panel;
  if (!result.logit_lens?.length) {
    region(node, "none", () =>
      el(
        "p",
        { class: "empty" },
        "The logit lens needs a model that writes tokens and has hidden states of the width of its output.",
      ),
    );
    return;
  }
  const note =
    "The head of the model applied to the output of every layer: its likeliest token, and how sure it is. The accent colour marks the token that is finally written, grey another one.";
  region(node, JSON.stringify([result.serial, theme]), () => {
    const value = el(
      "p",
      { class: "note value", "aria-live": "polite" },
      "Point at a cell to see the likeliest tokens.",
    );
    const notes = result.notes
      .filter((each) => each.includes("logit lens"))
      .map((each) => el("p", { class: "note" }, sentence(each)));
    return [figure("Logit lens", note, "logit-lens", picture(result, value)), value, notes];
  });
}

function picture(result, value) {
  const colours = palette();
  const colourOf = ramp(colours, 0.9);
  const other = ramp({ ...colours, accent: colours.negative }, 0.9);
  const tokens = result.tokens.output;
  const from = result.predictions.findIndex((each) => each !== null);
  const layers = result.logit_lens.map((each) => each.predictions.slice(from, tokens.length)).reverse(); // the last is on top
  const numbers = result.logit_lens.map((each) => each.layer).reverse();
  const name = (i) => stateName(numbers[i]);
  const written = tokens.slice(from);
  const widths = written.map((token, t) =>
    Math.max(
      48,
      ...[token, ...layers.map((row) => row[t].alternatives[0])].map(
        (each) => textWidth(shortened(shown(each), 16), 12.5) + 16,
      ),
    ),
  );
  const left = 66;
  const starts = widths.map((_, t) => left + widths.slice(0, t).reduce((sum, each) => sum + each, 0));
  const top = 30;
  const svg = newSvg(Math.ceil(starts.at(-1) + widths.at(-1) + 2), top + layers.length * ROW, "Logit lens");
  const label = (text, x, y, anchor, fill) =>
    svg
      .append("text")
      .attr("x", x)
      .attr("y", y)
      .attr("text-anchor", anchor)
      .attr("fill", fill)
      .attr("font-size", 12)
      .text(text);
  written.forEach((token, t) =>
    label(shortened(shown(token), 16), starts[t] + widths[t] / 2, 14, "middle", colours.text).attr("font-weight", 600),
  );
  layers.forEach((row, i) => {
    label(name(i), left - 10, top + i * ROW + ROW / 2, "end", colours.muted).attr("dy", "0.35em");
    row.forEach((cell, t) => {
      const best = cell.alternatives[0];
      const fill = (best.id === written[t].id ? colourOf : other)(best.probability);
      const group = svg.append("g").attr("transform", `translate(${starts[t]},${top + i * ROW})`);
      group
        .append("rect")
        .attr("width", widths[t] - 2)
        .attr("height", ROW - 2)
        .attr("rx", 4)
        .attr("fill", fill);
      const ink = inkOn(fill, colours);
      const write = (text, y, size) =>
        group
          .append("text")
          .attr("x", widths[t] / 2 - 1)
          .attr("y", y)
          .attr("text-anchor", "middle")
          .attr("font-size", size)
          .attr("fill", ink)
          .text(text);
      write(shortened(shown(best), 16), 16, 12.5);
      write(percent(best.probability), 29, 10);
      const describe = () => {
        const tops = cell.alternatives.map((each) => `${shown(each)} ${percent(each.probability)}`).join(", ");
        const own = cell.id === written[t].id ? ` The written token has ${percent(cell.probability)}.` : "";
        value.textContent = `${name(i)}, for ${shown(written[t])}: ${tops}.${own}`;
      };
      group.node().addEventListener("pointerenter", describe);
      group.node().addEventListener("pointerdown", describe);
    });
  });
  return svg.node();
}
