// Runs the checks of a client, and prints one JSON line for each: the counterpart of python/harness.py.
import { spawn } from "node:child_process";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname } from "node:path";

export const baseURL = process.env.BASE_URL; // with /v1
export const rootURL = baseURL.replace(/\/v1$/, "");
export const { API_KEY: apiKey, MODEL: model, ENGINE: engine, IMAGE: image, IMAGE_SEEN: imageSeen } = process.env;
export const { TEXT: text, REASONING: reasoning } = process.env;
export const textTokens = Number(process.env.TEXT_TOKENS); // in the engine's count
export const turn = "Which turn is this?";
const agents = JSON.parse(process.env.AGENTS ?? "{}"); // settings by agent, as docs/agents.md shows them
const leftOut = JSON.parse(process.env.LEFT_OUT ?? "{}"); // the reason by the end of the names of checks not to be run
export const city = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
export const cities = "What is the weather in Paris and Rome?";
export const long = `Remember these words. ${Array.from({ length: 200 }, (_, i) => `word${i}`).join(" ")}`;
export const weather = { city: "Paris", temperature: 21, sunny: true };
export const weatherSchema = {
  type: "object",
  properties: { city: { type: "string" }, temperature: { type: "integer" }, sunny: { type: "boolean" } },
  required: ["city", "temperature", "sunny"],
  additionalProperties: false,
};
const WITHIN = 30_000; // ms for a check

const checks = new Map();

// Write the files that the page shows for an agent below `home`. Returns the environment: HOME and the page's variables.
export function paste(name, home) {
  const { variables, files } = agents[name];
  for (const [path, text] of Object.entries(files)) {
    const place = path.replace("~", home);
    mkdirSync(dirname(place), { recursive: true });
    writeFileSync(place, text);
  }
  return { PATH: process.env.PATH, HOME: home, ...variables };
}

// The command that the page names for an agent.
export const settled = (name) => agents[name].command;

// The end of a program without a terminal: { out, error, code }.
export function ended(program, args, { env, cwd, input = "" }) {
  return new Promise((resolve) => {
    const child = spawn(program, args, { env, cwd, stdio: ["pipe", "pipe", "pipe"] });
    const found = { out: "", error: "" };
    child.stdout.on("data", (data) => (found.out += data));
    child.stderr.on("data", (data) => (found.error += data));
    child.on("close", (code) => resolve({ ...found, code }));
    child.stdin.end(input);
  });
}

let homes = 0;

// A folder of its own, with a file to edit.
export function newHome(prefix) {
  const home = `${process.env.HOME}/${prefix}-${++homes}`;
  mkdirSync(home);
  writeFileSync(`${home}/note.txt`, "one\n");
  return home;
}

export const EDIT = "run this command: `sed -i s/one/two/ note.txt`";
export const edited = (home) => equal(readFileSync(`${home}/note.txt`, "utf8").trim(), "two");

export function check(name, run) {
  expect(!checks.has(name), name);
  checks.set(name, run);
}

export function expect(holds, shown) {
  if (!holds) throw new Error((typeof shown === "string" ? shown : JSON.stringify(shown) ?? "").slice(0, 600));
}

export function equal(found, wanted) {
  expect(JSON.stringify(found) === JSON.stringify(wanted), `${JSON.stringify(found)} is not ${JSON.stringify(wanted)}`);
}

// The error with which `run` fails; fails where it returns, or fails with an error of another class.
export async function rejects(kind, run) {
  let returned;
  try {
    returned = await run();
  } catch (error) {
    if (error instanceof kind) return error;
    throw error;
  }
  throw new Error(`no ${kind.name}: returned ${JSON.stringify(returned)?.slice(0, 300)}`);
}

export async function collect(stream) {
  const items = [];
  for await (const item of stream) items.push(item);
  return items;
}

export async function seen() {
  return (await fetch(`${engine}/seen`)).json();
}

// Wait until the engine has lost one more caller.
export async function aborted(before, within = 3000) {
  const ends = Date.now() + within;
  while ((await seen()).aborts <= before) {
    expect(Date.now() < ends, `the engine still generates ${within / 1000} s after the client left`);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}

function version(name) {
  return JSON.parse(readFileSync(new URL(`node_modules/${name}/package.json`, import.meta.url))).version;
}

async function run(one) {
  const late = new Promise((_, reject) => setTimeout(() => reject(new Error("not done in time")), WITHIN).unref());
  try {
    await Promise.race([one(), late]);
    return { passed: true };
  } catch (error) {
    const line = /\/\w+\.mjs:(\d+):\d+/.exec(error?.stack?.replace(/.*harness\.mjs.*/g, "") ?? "")?.[1];
    return { passed: false, reason: `${error?.name}: ${error?.message}`.slice(0, 900), line: Number(line ?? 0) };
  }
}

export async function main(...packages) {
  const print = (value) => process.stdout.write(`${JSON.stringify(value)}\n`);
  print({ versions: Object.fromEntries(packages.map((name) => [name, version(name)])) });
  const chosen = process.argv.length > 2 ? process.argv.slice(2) : [...checks.keys()];
  const result = (name) => {
    const ending = Object.keys(leftOut).find((end) => name.endsWith(end));
    return ending ? { left_out: leftOut[ending] } : run(checks.get(name));
  };
  for (const name of chosen) if (checks.has(name)) print({ check: name, ...(await result(name)) });
  process.exit(0);
}
