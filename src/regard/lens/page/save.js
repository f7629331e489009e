// Save a picture as an SVG or PNG file.

import { el, FONT } from "./dom.js";
import { palette } from "./colour.js";

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = 16;

// A figure with a title, buttons to save it, and the picture itself. `make` returns the SVG element to save.
export function figure(title, note, name, picture, make = () => picture) {
  const buttons = ["svg", "png"].map((kind) =>
    el(
      "button",
      {
        type: "button",
        class: "quiet",
        "data-key": `save:${name}:${kind}`,
        "aria-label": `Save ${title} as ${kind.toUpperCase()}`,
        onclick: () => save(make(), name, kind),
      },
      kind.toUpperCase(),
    ),
  );
  return el(
    "figure",
    { class: "figure" },
    el("figcaption", {}, el("span", { class: "title" }, title), el("span", { class: "save" }, buttons)),
    note ? el("p", { class: "note" }, note) : null,
    el("div", { class: "scroll", "data-scroll": name }, picture),
  );
}

export async function save(svg, name, kind) {
  const { text, width, height } = serialized(svg);
  const file = new Blob([text], { type: "image/svg+xml" });
  if (kind === "svg") {
    download(file, `${name}.svg`);
    return;
  }
  const image = new Image();
  const address = URL.createObjectURL(file);
  await new Promise((resolve, reject) => {
    image.onload = resolve;
    image.onerror = () => reject(new Error("The picture could not be drawn."));
    image.src = address;
  });
  const canvas = document.createElement("canvas");
  const scale = Math.min(2, 8000 / Math.max(width, height));
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.drawImage(image, 0, 0, width, height);
  URL.revokeObjectURL(address);
  canvas.toBlob((blob) => download(blob, `${name}.png`), "image/png");
}

// The text of a picture as a file: with a background, a margin, and the font of the page.
export function serialized(svg) {
  const copy = svg.cloneNode(true);
  const width = Number(svg.getAttribute("width")) + 2 * MARGIN;
  const height = Number(svg.getAttribute("height")) + 2 * MARGIN;
  const paper = document.createElementNS(SVG, "rect");
  for (const [key, value] of Object.entries({ x: -MARGIN, y: -MARGIN, width, height, fill: palette().surface }))
    paper.setAttribute(key, value);
  copy.prepend(paper);
  copy.setAttribute("xmlns", SVG);
  copy.setAttribute("viewBox", `${-MARGIN} ${-MARGIN} ${width} ${height}`);
  copy.setAttribute("width", width);
  copy.setAttribute("height", height);
  copy.setAttribute("font-family", FONT);
  copy.removeAttribute("style");
  return { text: new XMLSerializer().serializeToString(copy), width, height };
}

function download(blob, name) {
  const link = el("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

export function newSvg(width, height, label) {
  const svg = d3.create("svg").attr("width", width).attr("height", height).attr("viewBox", `0 0 ${width} ${height}`);
  svg.attr("role", "img").attr("aria-label", label).attr("font-family", FONT).attr("font-size", 13);
  return svg;
}
