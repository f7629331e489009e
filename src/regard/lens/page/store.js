// The state of the page. The part of the address after # holds all of it, so that an address reproduces the view.

const DEFAULTS = {
  models: [null, null], // the names of the shown models; the second is null unless two are compared
  text: null,
  beam: null,
  length: null,
  tab: "attention",
  kind: null,
  layer: null,
  head: 0,
  unit: "subwords",
  view: "bipartite",
  token: null, // position of the decoder whose alternatives are shown
  panel: 0, // the panel of that token
  scheme: 0,
  side: null,
  step: null,
  heads: [{}, {}], // for each panel: {kind: {"layer.head": factor}}
  forced: [[], []], // for each panel: the ids of the forced tokens
  theme: null,
};

// What a result of the server depends on. The other keys change only how it is drawn.
const ASKED = ["models", "text", "beam", "length", "heads", "forced"];

// `settled` returns a state that can be shown, for one that an address gives.
export function createStore(settled) {
  const given = () => settled({ ...structuredClone(DEFAULTS), ...read(location.hash) });
  let state = given();
  const listeners = [];
  const update = (patch, replace = true) => {
    const asks = ASKED.some((key) => key in patch && JSON.stringify(patch[key]) !== JSON.stringify(state[key]));
    state = { ...state, ...patch };
    const hash = `#${written(state)}`;
    if (hash !== location.hash) history[replace ? "replaceState" : "pushState"](null, "", hash);
    listeners.forEach((listener) => listener(state, asks));
  };
  addEventListener("hashchange", () => {
    state = given();
    listeners.forEach((listener) => listener(state, true));
  });
  return { get: () => state, update, subscribe: (listener) => listeners.push(listener) };
}

const PLAIN = { q: "text", t: "tab", k: "kind", u: "unit", v: "view", side: "side", theme: "theme" };
const NUMBERS = { b: "beam", n: "length", l: "layer", h: "head", w: "token", p: "panel", s: "scheme", z: "step" };

function written(state) {
  const out = new URLSearchParams();
  state.models.forEach((name, i) => name !== null && out.set(i ? "m2" : "m", name));
  for (const [short, name] of [...Object.entries(PLAIN), ...Object.entries(NUMBERS)])
    if (state[name] !== null && state[name] !== DEFAULTS[name]) out.set(short, state[name]);
  state.heads.forEach((heads, i) => {
    const kinds = Object.entries(heads).filter(([, each]) => Object.keys(each).length);
    const text = kinds.map(
      ([kind, each]) =>
        `${kind}:${Object.entries(each)
          .map(([at, x]) => `${at}=${x}`)
          .join("_")}`,
    );
    if (text.length) out.set(`x${i || ""}`, text.join("~"));
  });
  state.forced.forEach((ids, i) => ids.length && out.set(`f${i || ""}`, ids.join(".")));
  return out.toString();
}

function read(hash) {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const state = { models: [given.get("m"), given.get("m2")], heads: [{}, {}], forced: [[], []] };
  for (const [short, name] of Object.entries(PLAIN)) if (given.has(short)) state[name] = given.get(short);
  for (const [short, name] of Object.entries(NUMBERS)) {
    const value = Number.parseInt(given.get(short) ?? "", 10);
    if (value >= 0) state[name] = value;
  }
  [0, 1].forEach((i) => {
    for (const part of (given.get(`x${i || ""}`) ?? "").split("~").filter(Boolean)) {
      const [kind, entries = ""] = part.split(":");
      const pairs = entries
        .split("_")
        .map((entry) => entry.split("="))
        .filter(([at, x]) => /^\d+\.\d+$/.test(at) && x >= 0);
      state.heads[i][kind] = Object.fromEntries(pairs.map(([at, x]) => [at, Number(x)]));
    }
    const ids = (given.get(`f${i || ""}`) ?? "").split(".").filter((id) => /^\d+$/.test(id));
    state.forced[i] = ids.map(Number);
  });
  return state;
}

// The heads of a panel with one factor changed. A factor of 1 is left out.
export function withFactor(heads, kind, at, factor) {
  const own = { ...(heads[kind] ?? {}) };
  if (factor === 1) delete own[at];
  else own[at] = factor;
  const changed = { ...heads, [kind]: own };
  if (!Object.keys(own).length) delete changed[kind];
  return changed;
}

export function changedHeads(heads) {
  return Object.values(heads).reduce((count, each) => count + Object.keys(each).length, 0);
}
