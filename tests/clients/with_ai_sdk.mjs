// Vercel AI SDK: @ai-sdk/openai calls Responses by default, .chat() Chat Completions.
import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { MODEL, IMAGE, IMAGE_QUESTION, QUESTION, URL, report } from "./cells.mjs";

const openai = createOpenAI({ baseURL: `${URL}/v1`, apiKey: "no-key" });
const Trip = z.object({ city: z.enum(["Paris", "Rome"]), days: z.literal([1, 2, 3]) });
const forecast = tool({
  description: "The weather",
  inputSchema: Trip,
  execute: async () => "sunny",
});
const imageMessages = [{ role: "user", content: [
  { type: "text", text: IMAGE_QUESTION },
  { type: "file", data: IMAGE, mediaType: "image/png" },
] }];

const cells = (model) => {
  const base = { model, maxRetries: 0, maxOutputTokens: 200 };
  return {
    async text() {
      const asked = { role: "user", content: QUESTION };
      const first = await generateText({ ...base, messages: [asked] });
      assert(first.text);
      // Responses: the answer is not sent again, but named.
      const messages = [asked, ...first.response.messages, asked];
      assert((await generateText({ ...base, messages })).text);
    },
    async image() {
      assert((await generateText({ ...base, messages: imageMessages })).text.includes("red"));
    },
    async streaming() {
      let error;
      const stream = streamText({ ...base, prompt: QUESTION, onError: (e) => { error = e.error; } });
      const deltas = [];
      for await (const delta of stream.textStream) deltas.push(delta);
      if (error) throw error;
      assert(deltas.length > 1);
    },
    async tools() {
      const answer = await generateText({
        ...base, prompt: QUESTION, tools: { forecast }, toolChoice: "required", stopWhen: stepCountIs(1),
        // The demonstration model repeats a call until it may not.
        providerOptions: { openai: { parallelToolCalls: false } },
      });
      assert(answer.toolCalls.length > 0 && answer.toolResults.length > 0);
      for (const call of answer.toolCalls) Trip.parse(call.input);
    },
    async structured() {
      const answer = await generateText({ ...base, prompt: QUESTION, output: Output.object({ schema: Trip }) });
      Trip.parse(answer.output);
    },
  };
};
const named = {};
for (const [name, cell] of Object.entries(cells(openai.chat(MODEL)))) named[name] = cell;
for (const [name, cell] of Object.entries(cells(openai(MODEL)))) named[`responses_${name}`] = cell;
await report(named);
