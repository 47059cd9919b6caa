/* The OpenAPI document as a page: for each endpoint curls to copy or to run here, then its fields, folded. */
import {codeBlock} from "./code.js";
import {$, button, element} from "./dom.js";

const PREFIX = "#/components/schemas/", BASE = new URL(".", location.href).href.replace(/\/$/, "");
const MAX_SHOWN = 20000, MEDIA = ["image", "video"];
const el = (tag, ...children) => element(tag, "", ...children);
const key = sessionStorage.getItem("key");   // as given on the chat page
const headers = {"content-type": "application/json", ...(key ? {authorization: "Bearer " + key} : {})};
let schemas = {};   // objects by their names

/* The type of a field as text; objects are there by their names. */
function typeOf(schema) {
  if (schema.$ref) return schema.$ref.slice(PREFIX.length);
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(" | ");
  const bounds = [
    ["≥ ", schema.minimum], ["> ", schema.exclusiveMinimum], ["≤ ", schema.maximum],
    ["at least ", schema.minItems ?? schema.minLength], ["at most ", schema.maxItems ?? schema.maxLength],
  ].filter(([, v]) => v !== undefined).map(([word, v]) => word + v);
  let name = schema.type || "any";
  if (schema.enum) name = schema.enum.map(v => JSON.stringify(v)).join(" | ");
  else if ("const" in schema) name = JSON.stringify(schema.const);
  else if (schema.type === "array") name = `[${typeOf(schema.items || {})}]`;
  else if (schema.type === "object" && schema.additionalProperties) name = `{string: ${typeOf(schema.additionalProperties)}}`;
  return bounds.length ? `${name} (${bounds.join(", ")})` : name;
}

/* Names of the objects that a type mentions. */
function objectsOf(schema) {
  if (schema.$ref) return [schema.$ref.slice(PREFIX.length)];
  const inner = [...(schema.anyOf || []), schema.items, schema.additionalProperties];
  return [...new Set(inner.filter(each => each && typeof each === "object").flatMap(objectsOf))];
}

/* Text in which `words` between backticks are code. */
function prose(text) {
  return text.split("`").map((part, i) => i % 2 ? el("code", part) : part);
}

/* A folded part of the page, which is filled when it is first opened. */
function folded(summary, fill) {
  const box = el("details", el("summary", ...summary));
  box.addEventListener("toggle", () => box.append(...fill()), {once: true});
  return box;
}

function objects(schema) {
  return objectsOf(schema).map(name =>
    folded([el("b", name), " ", ...prose(schemas[name].description || "")], () => fields(schemas[name])));
}

function fields(schema) {
  const all = Object.entries(schema.properties || {}), required = schema.required || [];
  const shown = all.filter(([, field]) => !field["x-no-effect"]).map(([name, field]) => element("div", "field",
    el("code", name), " ", element("span", "soft", typeOf(field) + (required.includes(name) ? ", required" : "")),
    el("p", ...prose(field.description || "")), ...objects(field)));
  const hints = all.filter(([, field]) => field["x-no-effect"]).map(([name, {enum: values}]) =>
    values?.length > 1 ? `${name} (${values.slice(1).map(v => JSON.stringify(v)).join(", ")})` : name);
  if (hints.length) shown.push(folded(["Accepted without effect"], () => [el("p", hints.join(", "))]));
  return shown.length ? shown : [el("p", "No fields.")];
}

/* The fields of a body: those of its object at once, or several objects to choose from. */
function body(title, content) {
  return Object.entries(content || {}).filter(([, c]) => Object.keys(c.schema).length).map(([kind, {schema}]) => {
    const events = kind === "text/event-stream" ? " (each event of a stream)" : "", type = typeOf(schema);
    return folded([el("b", title + events), " ", type.includes("|") ? "" : el("code", type)],
      () => schema.$ref ? fields(schemas[type]) : objects(schema));
  });
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
    answer.textContent = await ask(method, ours(url), source.includes(" -F ") ? form(ours("MODEL")) : body && ours(JSON.stringify(body))).catch(String);
    box.append(answer);
    run.disabled = false;
  }, "Run");
  box.firstChild.firstChild.textContent = label || "curl";
  box.firstChild.append(run);
  return box;
}

/* The form of a batch's file, with one line. */
function form(model) {
  const found = new FormData(), messages = [{role: "user", content: "Who are you?"}];
  const line = {custom_id: "1", method: "POST", url: "/v1/chat/completions", body: {model, messages}};
  found.append("purpose", "batch");
  found.append("file", new Blob([JSON.stringify(line)]), "lines.jsonl");
  return found;
}

async function ask(method, url, body) {
  const {"content-type": type, ...rest} = headers; // The browser writes the type of a form itself.
  const response = await fetch(url || "./", {method, headers: body instanceof FormData ? rest : headers, body}), text = await response.text();
  let shown = text;
  try { shown = JSON.stringify(JSON.parse(text), null, 2); } catch { /* not JSON */ }
  return `${response.status} ${response.headers.get("content-type")}\n\n${shown.slice(0, MAX_SHOWN)}`;
}

function endpoint(path, method, op, asked) {
  const upper = method.toUpperCase(), json = op.requestBody?.content["application/json"];
  const samples = op["x-codeSamples"].filter(({label}) => !MEDIA.includes(label) || asked.takes.includes(label));
  const made = el("section",
    el("h3", element("span", "method", upper), " " + path), el("p", op.summary + "."),
    ...samples.map(each => sample(upper, path, each, json?.examples[each.label].value, asked)),
    ...body("Request", op.requestBody?.content),
    ...body("Answer", op.responses["200"].content),
    ...body("Error", op.responses.default.content));
  made.id = op.operationId;
  return made;
}

async function show() {
  const [doc, asked] = await Promise.all([fetch("openapi.json").then(r => r.json()), server()]);
  $("server").append("Base URL for OpenAI's clients: ", el("code", BASE + "/v1"), asked.needsKey
    ? ". This server needs a key: export API_KEY=… before a curl; Run takes the one of the chat page's settings." : ".");
  schemas = doc.components.schemas;
  const operations = Object.entries(doc.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, op]) => [path, method, op]));
  $("main").replaceChildren(...operations.map(each => endpoint(...each, asked)));
  $("endpoints").replaceChildren(el("ul", ...operations.map(([path, method, op]) => {
    const link = el("a", element("span", "method", method.toUpperCase()), " " + path);
    link.href = "#" + op.operationId;
    return el("li", link);
  })));
  document.getElementById(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView();
}

show().catch(error => { $("main").textContent = "openapi.json cannot be read: " + error; });
