/* The settings dialog: what is sent with each question, the theme, and the API key. The settings are kept in this
   browser, the key in this tab only. */
import {$} from "./dom.js";

const FIELDS = ["system", "temperature", "length", "thinking", "theme"];
let kept = {}, canSwitchThinking = false;
try { kept = JSON.parse(localStorage.getItem("settings")) ?? {}; } catch { /* none, or no storage */ }

export const apiKey = () => sessionStorage.getItem("key") ?? "";
export const systemPrompt = () => kept.system?.trim() ?? "";

/* The fields of a request that are set. */
export function requestFields() {
  return {
    ...(kept.temperature ? {temperature: Number(kept.temperature)} : {}),
    ...(kept.length ? {max_tokens: Number(kept.length)} : {}),
    ...(kept.thinking && canSwitchThinking ? {enable_thinking: kept.thinking === "on"} : {}),
  };
}

/* Shows the switch of thinking if the model has one. */
export function showThinking(canSwitch) {
  canSwitchThinking = canSwitch;
  $("thinking").hidden = !canSwitch;
}

/* Opens the dialog; at the key, if the server needs one or has refused this one. */
export function openSettings(needsKey = false) {
  for (const name of FIELDS) $("set-" + name).value = kept[name] ?? "";
  $("set-key").value = apiKey();
  $("set-key").setAttribute("aria-invalid", String(needsKey));
  $("key-state").hidden = !needsKey;
  $("key-state").textContent = !needsKey ? "" : apiKey() ? "This key was not accepted." : "This server needs an API key.";
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

/* Wires the dialog. `onKey` is called with another key, and returns a promise of whether the server accepts it. */
export function startSettings(onKey) {
  for (const name of FIELDS) $("set-" + name).oninput = () => change(name);
  $("open-settings").onclick = () => openSettings();
  $("reset-settings").onclick = () => {
    for (const name of FIELDS) { $("set-" + name).value = ""; change(name); }
  };
  const save = () => {
    const key = $("set-key").value.trim();
    sessionStorage.setItem("key", key);
    return onKey();
  };
  $("key-form").onsubmit = async event => {
    event.preventDefault();
    if (await save() && $("settings").open) $("settings").close();
  };
  $("settings").onclose = () => { if ($("set-key").value.trim() !== apiKey()) save(); };
  show();
}
