/* The settings dialog: what is sent with each question, the theme, and the API key. They are kept in this browser,
   the key for this tab alone. */
import {$} from "./dom.js";

const FIELDS = ["system", "temperature", "length", "theme"];
let kept = {};
try { kept = JSON.parse(localStorage.getItem("settings")) ?? {}; } catch { /* none, or no storage */ }

export const apiKey = () => sessionStorage.getItem("key") ?? "";
export const systemPrompt = () => kept.system?.trim() ?? "";

/* The fields of a request that are set. */
export function requestFields() {
  return {
    ...(kept.temperature ? {temperature: Number(kept.temperature)} : {}),
    ...(kept.length ? {max_tokens: Number(kept.length)} : {}),
  };
}

/* Opens the dialog; at the key, if the server asks for one. */
export function openSettings(needsKey = false) {
  for (const name of FIELDS) $("set-" + name).value = kept[name] ?? "";
  $("set-key").value = apiKey();
  $("key-needed").hidden = !needsKey;
  if (!$("settings").open) $("settings").showModal();
  $(needsKey ? "set-key" : "set-system").focus();
}

function change(name) {
  const field = $("set-" + name);
  field.setAttribute("aria-invalid", String(!field.validity.valid));
  if (!field.validity.valid) return;
  kept[name] = field.value;
  show();
  try { localStorage.setItem("settings", JSON.stringify(kept)); } catch { /* for this tab then */ }
}

function show() {
  document.documentElement.dataset.theme = kept.theme ?? "";
  const changed = FIELDS.some(name => name !== "theme" && kept[name]?.trim());
  $("open-settings").classList.toggle("changed", changed);
  $("open-settings").title = changed ? "Settings: some are not the model's defaults" : "Settings";
}

/* Wires the dialog; `onKey` is called when it closes with another key. */
export function startSettings(onKey) {
  for (const name of FIELDS) $("set-" + name).oninput = () => change(name);
  $("open-settings").onclick = () => openSettings();
  $("reset-settings").onclick = () => {
    for (const name of FIELDS) { $("set-" + name).value = ""; change(name); }
  };
  $("settings").onclose = () => {
    const key = $("set-key").value.trim();
    if (key === apiKey()) return;
    sessionStorage.setItem("key", key);
    onKey();
  };
  show();
}
