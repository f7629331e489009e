// Ask the server, or read what a saved page contains.

import { Tensor } from "./tensors.js";

const saved = document.getElementById("saved");
const embedded = saved ? JSON.parse(saved.textContent) : null;
const answers = new Map(); // the latest answers by request, because a switched head is often switched back
const KEPT = 24;

export const offline = embedded !== null;

export async function loadModels() {
  if (offline) return { models: embedded.models, view: embedded.view };
  return ask("lens/api/models");
}

export async function inspect(request, signal) {
  if (offline) return prepared(embedded.results.find((result) => result.model === request.model));
  const key = JSON.stringify(request);
  if (!answers.has(key)) {
    const answer = prepared(await ask("lens/api/inspect", request, signal));
    answers.set(key, answer);
    if (answers.size > KEPT) answers.delete(answers.keys().next().value);
  }
  return answers.get(key);
}

async function ask(path, body, signal) {
  let response;
  try {
    response = await fetch(path, {
      method: body ? "POST" : "GET",
      headers: body ? { "Content-Type": "application/json" } : {},
      body: body && JSON.stringify(body),
      signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer; start it again with regard lens RUN.");
  }
  let answer = null;
  try {
    answer = await response.json();
  } catch {
    throw new Error(`The server sent no JSON (status ${response.status}); look at the terminal in which it runs.`);
  }
  if (!response.ok) throw new Error(answer.error ?? `The server refused the request (status ${response.status}).`);
  return answer;
}

// Replace the packed tensors of an answer by tensors.
function prepared(value) {
  if (Array.isArray(value)) return value.map(prepared);
  if (value === null || typeof value !== "object") return value;
  if (Array.isArray(value.shape) && typeof value.data === "string") return Tensor.of(value);
  return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, prepared(each)]));
}
