// Colours of the current theme. Pictures get explicit colours, so that a saved file looks like the page.

export function palette() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  return {
    text: read("--text"),
    muted: read("--muted"),
    line: read("--line"),
    surface: read("--surface"),
    cell: read("--cell"),
    accent: read("--accent"),
    negative: read("--negative"),
    onAccent: read("--on-accent"),
  };
}

// A scale for weights in 0 .. 1. The exponent makes small weights visible.
export function ramp(colours, exponent = 0.65) {
  const between = d3.interpolateRgb(colours.cell, colours.accent);
  const steps = Array.from({ length: 101 }, (_, i) => d3.rgb(between((i / 100) ** exponent)).formatHex());
  return (weight) => steps[Math.round(100 * Math.min(1, Math.max(0, weight)))];
}

// A scale for values in -1 .. 1: grey below zero, the accent colour above.
export function signedRamp(colours) {
  const up = d3.interpolateRgb(colours.cell, colours.accent);
  const down = d3.interpolateRgb(colours.cell, colours.negative);
  return (value) => (value >= 0 ? up(Math.min(1, value)) : down(Math.min(1, -value)));
}

// A colour for text on a cell of the given colour.
export function inkOn(background, colours) {
  const { r, g, b } = d3.rgb(background);
  const light = 0.299 * r + 0.587 * g + 0.114 * b;
  const dark = d3.lab(colours.text).l < 50 ? colours.text : colours.surface;
  const pale = d3.lab(colours.text).l < 50 ? colours.surface : colours.text;
  return light > 140 ? dark : pale;
}

// A canvas with one pixel per cell of a matrix.
export function pixels(matrix, colourOf, scale = 1) {
  const [rows, columns] = matrix.shape;
  const canvas = document.createElement("canvas");
  canvas.width = columns * scale;
  canvas.height = rows * scale;
  const context = canvas.getContext("2d");
  for (let i = 0; i < rows; i++)
    for (let j = 0; j < columns; j++) {
      context.fillStyle = colourOf(matrix.get(i, j));
      context.fillRect(j * scale, i * scale, scale, scale);
    }
  return canvas;
}
