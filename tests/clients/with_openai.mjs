// openai for Node: chat, the streaming helper, parse, tools, Responses.
import assert from "node:assert";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { MODEL, IMAGE_QUESTION, IMAGE_URL, QUESTION, URL, PARAMETERS, report } from "./cells.mjs";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "no-key", maxRetries: 0 });
const chat = client.chat.completions;
const messages = [{ role: "user", content: QUESTION }];
const imageMessages = [{ role: "user", content: [
  { type: "text", text: IMAGE_QUESTION },
  { type: "image_url", image_url: { url: IMAGE_URL } },
] }];
const fn = { name: "forecast", description: "The weather", parameters: PARAMETERS, strict: true };
const tools = [{ type: "function", function: fn }];
const Trip = z.object({ city: z.enum(["Paris", "Rome"]), days: z.literal([1, 2, 3]) });
// The demonstration model repeats a call until it may not.
const oneCall = { tools, tool_choice: "required", parallel_tool_calls: false };
const base = { model: MODEL, temperature: 0, max_tokens: 200 };

await report({
  async text() {
    assert((await chat.create({ ...base, messages })).choices[0].message.content);
  },
  async image() {
    const answer = await chat.create({ ...base, messages: imageMessages });
    assert(answer.choices[0].message.content.includes("red"));
  },
  async streaming() {
    const whole = await chat.create({ ...base, messages });
    const final = await chat.stream({ ...base, messages }).finalContent();
    assert.equal(final, whole.choices[0].message.content);
  },
  async tools() {
    const answer = await chat.create({ ...base, messages, ...oneCall });
    const calls = answer.choices[0].message.tool_calls;
    assert(calls.length > 0);
    for (const call of calls) Trip.parse(JSON.parse(call.function.arguments));
  },
  async tools_streaming() {
    const stream = chat.stream({ ...base, messages, ...oneCall });
    const final = await stream.finalChatCompletion();
    for (const call of final.choices[0].message.tool_calls) Trip.parse(JSON.parse(call.function.arguments));
  },
  async structured() {
    const response_format = zodResponseFormat(Trip, "trip");
    const answer = await chat.parse({ ...base, messages: imageMessages, response_format });
    Trip.parse(answer.choices[0].message.parsed);
  },
  async responses() {
    const content = [
      { type: "input_text", text: IMAGE_QUESTION },
      { type: "input_image", image_url: IMAGE_URL, detail: "auto" },
    ];
    const answer = await client.responses.create({ model: MODEL, input: [{ role: "user", content }] });
    assert(answer.output_text.includes("red"));
    const stream = client.responses.stream({ model: MODEL, input: QUESTION });
    assert((await stream.finalResponse()).output_text);
  },
});
