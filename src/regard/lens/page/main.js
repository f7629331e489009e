// The lens: keep the state, ask the server, and draw.

import { inspect, loadModels, offline } from "./api.js";
import { askView, themeView } from "./ask.js";
import { attentionView } from "./attention.js";
import { beamView } from "./beam.js";
import { el, forget, region } from "./dom.js";
import { createHover } from "./hover.js";
import { layersView } from "./layers.js";
import { outputView } from "./output.js";
import { positionsView } from "./positions.js";
import { statesView } from "./states.js";
import { changedHeads, createStore } from "./store.js";

const VIEWS = {
  attention: ["Attention", attentionView],
  beam: ["Beam search", beamView],
  layers: ["Layers", layersView],
  positions: ["Positions", positionsView],
  states: ["States", statesView],
};
const SAVED =
  "This is a saved page. To type a sentence, force a token or switch a head, start the lens: regard lens RUN.";
const PAUSE = 60; // milliseconds to wait while a slider moves

const at = (id) => document.getElementById(id);
const panels = [createPanel(0), createPanel(1)];
let models = [];
let store = null;
let serial = 0;

function createPanel(index) {
  return {
    index,
    offline,
    hover: createHover(),
    result: null,
    baseline: null,
    problem: null,
    asked: null,
    output: null,
    view: null,
  };
}

function say(sentence) {
  at("notice").textContent = sentence ?? "";
  at("notice").hidden = !sentence;
}

// The link must not change the part of the address after #, which holds the state.
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  at("output").focus();
});

async function start() {
  const loaded = await loadModels();
  models = loaded.models;
  if (loaded.view && !location.hash) history.replaceState(null, "", `#${loaded.view}`);
  store = createStore(settled);
  store.update({}); // the address holds the whole state
  store.subscribe((_, asks) => {
    if (asks) refresh();
    render();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", render);
  let waiting = 0;
  new ResizeObserver(() => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(render);
  }).observe(document.body);
  refresh();
  render();
}

// The state for an address, with models that exist and a text.
function settled(state) {
  const known = (name) => models.some((each) => each.name === name);
  const unknown = state.models.filter((name) => name !== null && !known(name));
  const [first, second] = state.models;
  const shown = known(first) ? first : models[0].name;
  if (offline) say(SAVED);
  else say(unknown.length ? `There is no model ${unknown.join(", ")} here; another one is shown.` : null);
  return {
    ...state,
    models: [shown, known(second) && second !== shown ? second : null],
    text: state.text ?? models.find((each) => each.name === shown).example,
  };
}

function shownPanels() {
  return panels.filter((panel) => store.get().models[panel.index] !== null);
}

function request(panel, heads) {
  const state = store.get();
  const model = models.find((each) => each.name === state.models[panel.index]);
  const asked = { model: model.name, text: state.text };
  if (state.beam !== null && model.task !== "classify") asked.beam = state.beam;
  if (state.length !== null && model.task === "generate") asked.max_len = state.length;
  if (state.forced[panel.index].length && model.task !== "classify") asked.forced = state.forced[panel.index];
  if (changedHeads(heads))
    asked.heads = Object.fromEntries(
      Object.entries(heads).map(([kind, each]) => [
        kind,
        Object.entries(each).map(([place, factor]) => [...place.split(".").map(Number), factor]),
      ]),
    );
  return asked;
}

function refresh() {
  shownPanels().forEach((panel) => answer(panel));
}

// Ask for a panel: with the switched heads, and once without, for the comparison. A newer request replaces this one.
async function answer(panel) {
  panel.asked?.abort();
  const own = (panel.asked = new AbortController());
  const heads = store.get().heads[panel.index];
  if (!store.get().text.trim()) {
    Object.assign(panel, { busy: false, result: null, baseline: null, problem: null });
    return;
  }
  panel.busy = true;
  markBusy(panel);
  try {
    if (panel.result) await new Promise((resolve) => setTimeout(resolve, PAUSE));
    if (own.signal.aborted) return;
    const [result, baseline] = await Promise.all([
      inspect(request(panel, heads), own.signal),
      changedHeads(heads) && !offline ? inspect(request(panel, {}), own.signal) : null,
    ]);
    if (own.signal.aborted) return;
    for (const each of [result, baseline]) if (each) each.serial ??= ++serial;
    Object.assign(panel, { result, baseline, problem: null });
  } catch (error) {
    if (error.name === "AbortError" || own.signal.aborted) return;
    panel.problem = error.message;
  } finally {
    if (panel.asked === own) {
      panel.busy = false;
      render();
    }
  }
}

function render() {
  const state = store.get();
  const root = document.documentElement;
  if (state.theme) root.dataset.theme = state.theme;
  else delete root.dataset.theme;
  const theme = state.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const update = store.update;
  themeView(at("settings"), { state, update });
  askView(at("ask"), { models, state, update, offline });
  const now = shownPanels();
  layOut(now);
  const tabs = Object.keys(VIEWS).filter((name) => now.some((panel) => panel.result && has(panel.result, name)));
  const tab = tabs.includes(state.tab) ? state.tab : tabs[0];
  tabsView(tabs, tab, update);
  for (const panel of now) {
    Object.assign(panel, { state, update, theme });
    problemView(panel);
    if (!panel.result) {
      region(panel.output.children[2], "empty", () =>
        panel.busy || panel.problem ? null : el("p", { class: "empty" }, "Type a text above."),
      );
      region(panel.view.lastElementChild, "empty", () => null);
      continue;
    }
    outputView(panel.output.children[2], panel);
    const node = panel.view.lastElementChild;
    if (node.dataset.tab !== tab) {
      node.dataset.tab = tab;
      forget(node);
      panel.hover.drop("picture");
    }
    VIEWS[tab]?.[1](node, panel);
  }
  document.title = `${now[0]?.result?.output ? `${now[0].result.output.slice(0, 60)} · ` : ""}regard lens`;
}

function has(result, tab) {
  if (tab === "attention") return Object.keys(result.attention).length > 0;
  if (tab === "beam") return result.tree.length > 0;
  if (tab === "layers") return result.logit_lens.length > 0;
  return true;
}

function heading(name) {
  const model = models.find((each) => each.name === name);
  const about = `${model.family.replaceAll("_", "-")}, ${model.parameters.toLocaleString("en")} parameters`;
  return el("h2", {}, name, " ", el("span", { class: "about" }, about));
}

// One column for each shown model, above the tabs and below.
function layOut(now) {
  const names = now.map((panel) => store.get().models[panel.index]);
  const titled = models.length > 1;
  region(at("output"), JSON.stringify(names), () =>
    now.map((panel) => {
      panel.output = el(
        "section",
        { class: "panel", "aria-label": names[panel.index] },
        titled ? heading(names[panel.index]) : el("span", {}),
        el("p", { class: "problem", role: "alert" }),
        el("div", {}),
      );
      if (panel.result && panel.result.model !== names[panel.index])
        Object.assign(panel, { result: null, baseline: null });
      return panel.output;
    }),
  );
  region(at("views"), JSON.stringify(names), () =>
    now.map((panel) => {
      panel.view = el(
        "section",
        { class: "panel", "aria-label": names[panel.index] },
        titled && now.length > 1 ? el("h2", {}, names[panel.index]) : null,
        el("div", { class: "view" }),
      );
      return panel.view;
    }),
  );
  for (const node of [at("output"), at("views")]) node.classList.toggle("two", now.length > 1);
}

function problemView(panel) {
  const node = panel.output.children[1];
  node.textContent = panel.problem ?? "";
  node.hidden = !panel.problem;
  markBusy(panel);
}

function markBusy(panel) {
  for (const node of [panel.output, panel.view]) {
    node?.setAttribute("aria-busy", String(Boolean(panel.busy)));
    node?.classList.toggle("stale", Boolean(panel.problem));
  }
}

function tabsView(tabs, chosen, update) {
  at("views").setAttribute("aria-labelledby", `tab-${chosen}`);
  at("tabs").onkeydown = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = tabs[(tabs.indexOf(chosen) + step + tabs.length) % tabs.length];
    at(`tab-${next}`).focus();
    update({ tab: next });
  };
  region(at("tabs"), JSON.stringify([tabs, chosen]), () =>
    tabs.map((name) =>
      el(
        "button",
        {
          type: "button",
          role: "tab",
          id: `tab-${name}`,
          "aria-selected": String(name === chosen),
          "aria-controls": "views",
          tabindex: name === chosen ? 0 : -1,
          "data-key": `tab:${name}`,
          onclick: () => update({ tab: name }),
        },
        VIEWS[name][0],
      ),
    ),
  );
}

addEventListener("error", (event) => say(`The page has an error: ${event.message}. Reload it to go on.`));
addEventListener("unhandledrejection", (event) =>
  say(`The page has an error: ${event.reason?.message ?? event.reason}. Reload it to go on.`),
);
start().catch((error) => say(error.message));
