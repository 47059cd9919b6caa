/* The OpenAPI document as a page: for each endpoint curls to copy or to run here, then its types. */
import {codeBlock} from "./code.js";
import {$, button, element} from "./dom.js";

const PREFIX = "#/components/schemas/", BASE = new URL(".", location.href).href.replace(/\/$/, "");
const MAX_SHOWN = 20000, MEDIA = ["image", "video"];
const el = (tag, ...children) => element(tag, "", ...children);
const key = sessionStorage.getItem("key");   // as given on the chat page
const headers = {"content-type": "application/json", ...(key ? {authorization: "Bearer " + key} : {})};

function link(name) {
  const a = el("a", name);
  a.href = "#" + name;
  return a;
}

function typeOf(schema) {
  const out = el("code");
  if (schema.$ref) out.append(link(schema.$ref.slice(PREFIX.length)));
  else if (schema.anyOf) schema.anyOf.forEach((s, i) => out.append(i ? " | " : "", typeOf(s)));
  else if (schema.enum) out.append(schema.enum.map(v => JSON.stringify(v)).join(" | "));
  else if ("const" in schema) out.append(JSON.stringify(schema.const));
  else if (schema.type === "array") out.append("[", typeOf(schema.items || {}), "]");
  else if (schema.type === "object" && schema.additionalProperties) {
    out.append("{string: ", typeOf(schema.additionalProperties), "}");
  } else out.append(schema.type || "any");
  const bounds = [
    ["≥ ", schema.minimum], ["> ", schema.exclusiveMinimum], ["≤ ", schema.maximum],
    ["at least ", schema.minItems ?? schema.minLength], ["at most ", schema.maxItems ?? schema.maxLength],
  ].filter(([, v]) => v !== undefined).map(([word, v]) => word + v);
  if (bounds.length) out.append(" (" + bounds.join(", ") + ")");
  return out;
}

function fields(schema) {
  const table = el("table");
  for (const [name, field] of Object.entries(schema.properties || {})) {
    const row = table.insertRow();
    row.insertCell().append(el("code", name + ((schema.required || []).includes(name) ? " *" : "")));
    row.insertCell().append(typeOf(field));
    row.insertCell().append(field.description || "");
  }
  return table;
}

function bodies(title, content) {
  return Object.entries(content || {}).filter(([, c]) => Object.keys(c.schema).length)
    .map(([kind, c]) => el("p", title + " (" + kind + "): ", typeOf(c.schema)));
}

/* The served model and whether a key is needed; the examples are for it. */
async function server() {
  try {
    const response = await fetch("v1/models", {headers});
    if (response.status === 401) return {model: "MODEL", needsKey: true, takes: MEDIA};
    const [found] = (await response.json()).data;
    return {model: found.id, needsKey: !!key, takes: found.input_modalities};
  } catch {
    return {model: "MODEL", needsKey: false, takes: MEDIA};
  }
}

function sample(method, path, {label, source}, body, {model, needsKey}) {
  const ours = text => text.replaceAll("http://127.0.0.1:8000", BASE).replaceAll("MODEL", model);
  const curl = ours(needsKey ? source.replace(/(http:\S+)/, "$1 \\\n  -H \"Authorization: Bearer $API_KEY\"") : source);
  const box = codeBlock("sh", curl), answer = el("pre");
  answer.className = "answer";
  answer.tabIndex = 0;
  const run = button("run", `Run ${method} ${path} ${label}`.trim(), async () => {
    run.disabled = true;
    const url = new URL(source.match(/http:\S+/)[0]).pathname.slice(1);
    answer.textContent = await ask(method, ours(url), body && ours(JSON.stringify(body))).catch(String);
    box.append(answer);
    run.disabled = false;
  }, "Run");
  box.firstChild.firstChild.textContent = label || "curl";
  box.firstChild.append(run);
  return box;
}

async function ask(method, url, body) {
  const response = await fetch(url || "./", {method, headers, body}), text = await response.text();
  let shown = text;
  try { shown = JSON.stringify(JSON.parse(text), null, 2); } catch { /* not JSON */ }
  return `${response.status} ${response.headers.get("content-type")}\n\n${shown.slice(0, MAX_SHOWN)}`;
}

function endpoint(path, method, op, asked) {
  const upper = method.toUpperCase(), json = op.requestBody?.content["application/json"];
  const samples = op["x-codeSamples"].filter(({label}) => !MEDIA.includes(label) || asked.takes.includes(label));
  return el("section",
    el("h3", element("span", "method", upper), " " + path), el("p", op.summary + "."),
    ...samples.map(each => sample(upper, path, each, json?.examples[each.label].value, asked)),
    el("details", el("summary", "Types"),
      ...bodies("Request", op.requestBody?.content),
      ...bodies("Answer", op.responses["200"].content),
      ...bodies("Error", op.responses.default.content)));
}

async function show() {
  const [doc, asked] = await Promise.all([fetch("openapi.json").then(r => r.json()), server()]);
  $("server").append("Base URL for OpenAI's clients: ", el("code", BASE + "/v1"), asked.needsKey
    ? ". This server needs a key: export API_KEY=… before a curl; Run takes the one of the chat page's settings." : ".");
  $("main").replaceChildren(el("h2", "Endpoints"));
  for (const [path, methods] of Object.entries(doc.paths)) {
    for (const [method, op] of Object.entries(methods)) $("main").append(endpoint(path, method, op, asked));
  }
  $("main").append(el("h2", "Types"));
  for (const [name, schema] of Object.entries(doc.components.schemas)) {
    const box = element("details", "type", el("summary", el("b", name), " ", schema.description || ""), fields(schema));
    box.id = name;
    $("main").append(box);
  }
  const open = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target) { target.open = true; target.scrollIntoView(); }
  };
  addEventListener("hashchange", open);
  open();
}

show().catch(error => { $("main").textContent = "openapi.json cannot be read: " + error; });
