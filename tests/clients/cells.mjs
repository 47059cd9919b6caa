// As cells.py, for the scripts that run in Node.
import fs from "node:fs";

export const URL = process.env.TRIPTYCH_URL;
export const MODEL = "triptych-demo";
export const QUESTION = "What can you do?";
export const IMAGE_QUESTION = "What colour is the circle?";
export const IMAGE = fs.readFileSync(process.env.TRIPTYCH_IMAGE);
export const IMAGE_URL = `data:image/png;base64,${IMAGE.toString("base64")}`;
export const PARAMETERS = {
  type: "object",
  properties: { city: { enum: ["Paris", "Rome"] }, days: { enum: [1, 2, 3] } },
  required: ["city", "days"],
  additionalProperties: false,
};

export async function report(cells) {
  const outcomes = {};
  for (const [name, cell] of Object.entries(cells)) {
    try {
      await cell();
      outcomes[name] = "works";
    } catch (error) {
      if (process.env.TRIPTYCH_TRACE) console.error(error);
      const text = `${error.name}: ${error.message}`.replace(/\s+/g, " ");
      outcomes[name] = text.slice(0, 300);
    }
  }
  console.log(JSON.stringify(outcomes));
}
