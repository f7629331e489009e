// The form: the text, the search settings, the models, and the theme.

import { el, region, segments } from "./dom.js";

const WORDS = {
  translate: { label: "Sentence", button: "Translate" },
  generate: { label: "Prompt", button: "Continue" },
  classify: { label: "Text", button: "Classify" },
};

export function askView(form, { models, state, update, offline }) {
  const model = models.find((each) => each.name === state.models[0]) ?? models[0];
  const words = WORDS[model.task];
  if (!form.dataset.ready) {
    form.dataset.ready = "true";
    const send = () => update({ text: form.querySelector("textarea").value, forced: [[], []], token: null }, false);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      send();
    });
    form.append(
      el("label", { for: "text" }, words.label),
      el("textarea", {
        id: "text",
        rows: 2,
        maxlength: 4000,
        spellcheck: "false",
        readonly: offline,
        "data-key": "text",
        value: state.text,
        onkeydown: (event) => {
          if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
          event.preventDefault();
          if (!offline) send();
        },
      }),
      el("div", { class: "options" }),
    );
  }
  form.querySelector("label").textContent = words.label;
  const textarea = form.querySelector("textarea");
  if (form.dataset.text !== state.text) {
    form.dataset.text = state.text;
    textarea.value = state.text;
  }
  const others = models.filter((each) => each.name !== state.models[0]);
  region(form.querySelector(".options"), JSON.stringify([state.models, state.beam, state.length, offline]), () => [
    el("button", { type: "submit", class: "primary", disabled: offline }, words.button),
    model.task === "classify" ? null : counter("Beam size", "beam", state.beam ?? model.beam, 12, update, offline),
    model.task === "generate"
      ? counter("New tokens", "length", state.length ?? model.max_len, 200, update, offline)
      : null,
    models.length > 1
      ? chooser(
          "Model",
          "model",
          models,
          state.models[0],
          (name) =>
            update({
              models: [name, state.models[1] === name ? null : state.models[1]],
              heads: [{}, {}],
              forced: [[], []],
              token: null,
            }),
          offline && models.length < 2,
        )
      : null,
    others.length
      ? chooser(
          "Compare with",
          "compare",
          [{ name: "" }, ...others],
          state.models[1] ?? "",
          (name) =>
            update({
              models: [state.models[0], name || null],
              heads: [state.heads[0], {}],
              forced: [state.forced[0], []],
              token: null,
            }),
          false,
        )
      : null,
  ]);
}

function counter(label, name, value, most, update, disabled) {
  const change = (event) => {
    const number = Math.round(Number(event.currentTarget.value));
    if (number >= 1 && number <= most) update({ [name]: number });
    else event.currentTarget.value = value;
  };
  return el(
    "label",
    { class: "option" },
    label,
    " ",
    el("input", { type: "number", min: 1, max: most, value, disabled, "data-key": name, onchange: change }),
  );
}

function chooser(label, key, models, chosen, choose, disabled) {
  const options = models.map((each) =>
    el("option", { value: each.name, selected: each.name === chosen }, each.name || "no other model"),
  );
  return el(
    "label",
    { class: "option" },
    label,
    " ",
    el("select", { "data-key": key, disabled, onchange: (event) => choose(event.currentTarget.value) }, options),
  );
}

const THEMES = [
  ["auto", "Auto"],
  ["light", "Light"],
  ["dark", "Dark"],
];

export function themeView(node, { state, update }) {
  const chosen = state.theme ?? "auto";
  region(node, chosen, () =>
    segments("Theme", THEMES, chosen, (next) => update({ theme: next === "auto" ? null : next }), "theme"),
  );
}
