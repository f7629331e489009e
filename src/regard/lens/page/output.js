// The output of a model: its tokens with their probabilities, its score, and the alternatives of one token.

import { el, region } from "./dom.js";
import { decimal, percent, plural, sentence, shown, signed, startsWithSpace } from "./format.js";
import { selection } from "./kinds.js";
import { changedHeads } from "./store.js";

export function outputView(node, panel) {
  const { result, baseline, state, index } = panel;
  const key = [result.serial, baseline?.serial, state.panel === index ? state.token : null, state.forced[index]];
  region(node, JSON.stringify(key), () => {
    if (result.task === "classify") return [sourceLine(panel), classes(result, baseline), scoreLine(panel)];
    return [
      result.task === "translate" ? sourceLine(panel) : null,
      outputLine(panel),
      scoreLine(panel),
      alternatives(panel),
    ];
  });
}

function sourceLine(panel) {
  const { source, tokens: all } = panel.result;
  const [side, to] = panel.result.task === "classify" ? ["encoder", all.encoder.length] : [source.side, source.to];
  const tokens = all[side].slice(0, to);
  const chips = tokens.map((token, at) =>
    el(
      "span",
      {
        class: `token${token.special ? " special" : ""}`,
        ...hovering(panel, { side, from: at, to: at + 1, key: true }),
      },
      shown(token),
    ),
  );
  panel.hover.listen("source", (first, second) => {
    const weights = linked(panel, first);
    const on = [first, second].find((each) => each?.side === side && (side === "encoder" || each.key));
    chips.forEach((chip, at) => {
      chip.style.setProperty("--weight", weights ? weights[at] : 0);
      chip.classList.toggle("hovered", Boolean(on && on.from <= at && at < on.to));
    });
  });
  return el(
    "p",
    { class: "source", "aria-label": "Source" },
    chips.flatMap((chip, at) => (startsWithSpace(tokens[at]) && at ? [" ", chip] : [chip])),
  );
}

// The attention of a hovered output token: the chosen head if it reads the source, or the mean of the last such layer.
function linked(panel, hover) {
  if (hover?.side !== "decoder" || hover.key) return null;
  const kind = "decoder.cross" in panel.result.attention ? "decoder.cross" : "decoder.self";
  const layers = panel.result.attention[kind];
  if (!layers) return null;
  const chosen = selection(panel.result, panel.state);
  const matrix = chosen.kind === kind ? layers[chosen.layer].at(chosen.head) : layers.at(-1).mean();
  const rows = matrix.shape[0];
  const queries = [...Array(rows).keys()].slice(hover.from, hover.to); // the subwords of a word: their mean
  if (!queries.length) return null;
  const mean = (s) => queries.reduce((sum, t) => sum + matrix.get(t, s), 0) / queries.length;
  return Array.from({ length: matrix.shape[1] }, (_, s) => mean(s));
}

function hovering(panel, target) {
  const enter = () => panel.hover.set(target);
  return {
    onpointerenter: enter,
    onfocus: enter,
    onpointerleave: () => panel.hover.set(null),
    onblur: () => panel.hover.set(null),
  };
}

// Position t of the decoder writes token t of the output. The first positions of a prompt are not written by the model.
function outputLine(panel) {
  const { result, baseline, state, index } = panel;
  const first = result.first;
  const prompt = result.task === "generate" ? result.tokens.decoder.slice(0, first + 1) : [];
  const words = [];
  const spaced = (token, at) => startsWithSpace(token) && at;
  const spaces = [];
  const reads = []; // the decoder position that reads each word
  prompt.forEach((token, at) => {
    if (token.special) return;
    reads.push(at);
    spaces.push(spaced(token, at));
    words.push(el("span", { class: "token prompt" }, shown(token)));
  });
  const same = sharedLength(result, baseline);
  result.tokens.output.forEach((token, at) => {
    if (at < first) return;
    const prediction = result.predictions[at];
    const before =
      baseline && at <= same
        ? (baseline.predictions[at].alternatives.find((each) => each.id === token.id)?.probability ?? null)
        : null;
    spaces.push(spaced(token, at - first + prompt.length));
    reads.push(at + 1);
    words.push(outputToken(panel, { token, at, prediction, before }));
  });
  const fresh = panel.drawn !== result.serial; // tokens appear one after another, once
  panel.drawn = result.serial;
  words.forEach((word, i) => fresh && word.style.setProperty("--i", i));
  panel.hover.listen("output", (one, two) => {
    const on = [one, two].find((each) => each?.side === "decoder" && !each.key);
    const weights = result.task === "generate" ? linked(panel, one) : null;
    words.forEach((word, i) => word.style.setProperty("--weight", weights?.[reads[i]] ?? 0));
    words.forEach((word) =>
      word.classList.toggle(
        "hovered",
        Boolean(on && word.dataset.at && on.from <= word.dataset.at && word.dataset.at < on.to),
      ),
    );
  });
  const label = { translate: "Translation", generate: "Prompt and continuation" }[result.task];
  return el(
    "p",
    {
      class: `written${fresh ? " fresh" : ""}${state.token !== null && state.panel === index ? " open" : ""}`,
      "aria-label": label,
    },
    words.flatMap((word, at) => (spaces[at] ? [" ", word] : [word])),
  );
}

function outputToken(panel, { token, at, prediction, before }) {
  const { state, index, result } = panel;
  const open = state.panel === index && state.token === at;
  const forced = at - result.first < state.forced[index].length;
  const bar = el("span", { class: "bar" });
  bar.style.setProperty("--p", prediction.probability);
  const tick =
    before !== null && Math.abs(before - prediction.probability) > 0.002 ? el("span", { class: "tick" }) : null;
  tick?.style.setProperty("--p", before);
  const classes = ["token", "output", token.special && "special", open && "chosen", forced && "forced"];
  return el(
    "button",
    {
      type: "button",
      class: classes.filter(Boolean).join(" "),
      "data-key": `token:${at}`,
      "data-at": at,
      "aria-expanded": String(open),
      "aria-label": `${shown(token)}, probability ${percent(prediction.probability)}${forced ? ", forced" : ""}`,
      title: `${percent(prediction.probability)}${forced ? ", forced" : ""}`,
      onclick: () => panel.update({ token: open ? null : at, panel: index }),
      ...hovering(panel, { side: "decoder", from: at, to: at + 1 }),
    },
    el("span", {}, shown(token)),
    el("span", { class: "track", "aria-hidden": "true" }, bar, tick),
  );
}

// The number of output tokens before the first difference.
export function sharedLength(one, other) {
  if (!other) return 0;
  const [a, b] = [one.tokens.output, other.tokens.output];
  let at = 0;
  while (at < a.length && at < b.length && a[at].id === b[at].id) at++;
  return at;
}

function scoreLine(panel) {
  const { result, baseline, state, index } = panel;
  const facts = [];
  if (result.task !== "classify") {
    facts.push(el("span", { class: "fact" }, "score ", el("b", { class: "score" }, decimal(result.score))));
    if (baseline) facts.push(el("span", { class: "delta" }, difference(result.score - baseline.score)));
    facts.push(el("span", { class: "fact" }, `log p ${decimal(result.log_prob)}`));
    facts.push(el("span", { class: "fact" }, plural(result.tokens.output.length - result.first, "token")));
  }
  const heads = changedHeads(state.heads[index]);
  if (heads) facts.push(el("span", { class: "fact" }, `${plural(heads, "head")} changed`));
  const forced = state.forced[index].length;
  const release = () => {
    const all = [...state.forced];
    all[index] = [];
    panel.update({ forced: all, token: null });
  };
  if (forced)
    facts.push(
      el("span", { class: "fact" }, `${plural(forced, "token")} forced`),
      panel.offline
        ? null
        : el("button", { type: "button", class: "quiet", "data-key": "release", onclick: release }, "Release"),
    );
  const before =
    baseline && baseline.output !== result.output
      ? el("p", { class: "before" }, `With all heads on: ${baseline.output}`)
      : null;
  const warnings = result.notes
    .filter((each) => !each.includes("logit lens"))
    .map((each) => el("p", { class: "note" }, sentence(each)));
  return el("div", { class: "facts" }, el("p", {}, facts), before, warnings);
}

function difference(change) {
  return Math.abs(change) < 0.0005 ? "as with all heads on" : `${signed(change)} against all heads on`;
}

function alternatives(panel) {
  const { result, state, index } = panel;
  const at = state.token;
  if (state.panel !== index || at === null || at < result.first || at >= result.tokens.output.length) return null;
  const prediction = result.predictions[at];
  const written = result.tokens.output.slice(result.first, at).map((token) => token.id);
  const force = (id) => {
    const all = [...state.forced];
    all[index] = [...written, id];
    panel.update({ forced: all });
  };
  const names = prediction.alternatives.map(shown);
  const rows = prediction.alternatives.map((each, i) => {
    const twice = names.filter((name) => name === names[i]).length > 1; // with and without a space before it
    const name = twice && startsWithSpace(each) ? `␣${names[i]}` : names[i];
    const bar = el("span", { class: "bar" });
    bar.style.setProperty("--p", each.probability);
    const now = each.id === prediction.id;
    return el(
      "li",
      {},
      el(
        "button",
        {
          type: "button",
          class: `alternative${now ? " now" : ""}`,
          disabled: panel.offline,
          "data-key": `alternative:${each.id}`,
          "data-id": each.id,
          "aria-label": `${name}, ${percent(each.probability)}${now ? ", written" : ""}`,
          onclick: () => force(each.id),
        },
        el("span", { class: "name" }, name),
        el("span", { class: "track", "aria-hidden": "true" }, bar),
        el("span", { class: "p" }, percent(each.probability)),
      ),
    );
  });
  const note = panel.offline ? "Token " : "Choose a token to force it; the search continues from there. Token ";
  return el(
    "section",
    { class: "alternatives", "aria-label": "Alternatives" },
    el(
      "p",
      { class: "note" },
      note,
      el("b", {}, shown(result.tokens.output[at])),
      ` has probability ${percent(prediction.probability)}.`,
    ),
    el("ol", {}, rows),
  );
}

function classes(result, baseline) {
  const rows = [...result.classes].sort((a, b) => b.probability - a.probability).slice(0, 20);
  const before = new Map((baseline?.classes ?? []).map((each) => [each.label, each.probability]));
  return el(
    "ol",
    { class: "classes", "aria-label": "Classes" },
    rows.map((each, rank) => {
      const bar = el("span", { class: "bar" });
      bar.style.setProperty("--p", each.probability);
      const tick = before.has(each.label) ? el("span", { class: "tick" }) : null;
      tick?.style.setProperty("--p", before.get(each.label));
      return el(
        "li",
        { class: rank ? "" : "best" },
        el("span", { class: "name" }, each.label),
        el("span", { class: "track", "aria-hidden": "true" }, bar, tick),
        el("span", { class: "p" }, percent(each.probability)),
      );
    }),
  );
}
