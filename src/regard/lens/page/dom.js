// Build elements. Text is always inserted as text, never parsed as HTML.

export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

// Rebuild a node when `key` changes. The element that has the keyboard focus keeps it, by its attribute data-key.
export function region(node, key, build) {
  if (node.dataset.built === key) return;
  node.dataset.built = key;
  const focused = node.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  const places = [...node.querySelectorAll("[data-scroll]")].map((each) => [each.dataset.scroll, each.scrollLeft]);
  node.replaceChildren(...[build()].flat(2).filter(Boolean));
  if (focused) node.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  for (const [name, left] of places) {
    const scroller = node.querySelector(`[data-scroll="${CSS.escape(name)}"]`);
    if (scroller) scroller.scrollLeft = left;
  }
}

export function forget(node) {
  delete node.dataset.built;
}

// Buttons of which one is chosen: arrow keys move the choice, Tab leaves the group.
export function segments(label, options, chosen, choose, key) {
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const at = options.findIndex(([value]) => value === chosen);
    const next = options[(at + step + options.length) % options.length][0];
    event.currentTarget.querySelector(`[data-key="${CSS.escape(`${key}:${next}`)}"]`)?.focus();
    choose(next);
  };
  return el(
    "div",
    { class: "segments", role: "radiogroup", "aria-label": label, onkeydown: move },
    options.map(([value, text]) =>
      el(
        "button",
        {
          type: "button",
          role: "radio",
          "aria-checked": String(value === chosen),
          tabindex: value === chosen ? 0 : -1,
          "data-key": `${key}:${value}`,
          onclick: () => choose(value),
        },
        text,
      ),
    ),
  );
}

const measuring = document.createElement("canvas").getContext("2d");

export function textWidth(text, size = 13) {
  measuring.font = `${size}px ${FONT}`;
  return measuring.measureText(text).width;
}

export const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'DejaVu Sans', sans-serif";

// A text that is cut to a width in pixels.
export function fitted(text, width, size = 13) {
  if (textWidth(text, size) <= width) return text;
  const characters = [...text];
  while (characters.length > 1 && textWidth(`${characters.join("")}…`, size) > width) characters.pop();
  return `${characters.join("")}…`;
}

export function shortened(text, most = 22) {
  const characters = [...text];
  return characters.length > most ? `${characters.slice(0, most - 1).join("")}…` : text;
}
