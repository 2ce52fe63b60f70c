// Codex's command line, without a terminal: `codex exec`.
import { spawn } from "node:child_process";
import { mkdirSync, writeFileSync } from "node:fs";
import { apiKey, baseURL, check, equal, expect, main, model, text, textTokens } from "./harness.mjs";

const program = new URL("node_modules/.bin/codex", import.meta.url).pathname;
const provider = (more) => `model_provider = "gateway"
[model_providers.gateway]
name = "gateway"
base_url = "${baseURL}"
env_key = "CODEX_KEY"
wire_api = "responses"
${more ?? ""}`;

function run(home, args, input = "") {
  return new Promise((resolve) => {
    const env = { ...process.env, CODEX_HOME: home, CODEX_KEY: apiKey };
    const child = spawn(program, args, { env, cwd: home, stdio: ["pipe", "pipe", "pipe"] });
    let out = "";
    let error = "";
    child.stdout.on("data", (data) => (out += data));
    child.stderr.on("data", (data) => (error += data));
    child.on("close", () => resolve({ out, error }));
    child.stdin.end(input);
  });
}

let homes = 0;

function newHome(config, name) {
  const home = `${process.env.HOME}/codex-${++homes}`;
  mkdirSync(home);
  writeFileSync(`${home}/config.toml`, `model = "${name}"\n${config}`);
  return home;
}

// The events of a turn; `said`: messages of the agent.
async function exec(prompt, { config = provider(), name = model, home = newHome(config, name) } = {}) {
  const args = ["exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", prompt];
  const { out, error } = await run(home, args);
  const events = out.split("\n").filter((line) => line.startsWith("{")).map((line) => JSON.parse(line));
  const items = events.filter((event) => event.type === "item.completed").map((event) => event.item);
  const said = items.filter((item) => item.type === "agent_message").map((item) => item.text);
  const failed = events.filter((event) => event.type === "turn.failed").map((event) => event.error.message);
  return { events, items, said, failed: failed.join(), error };
}

check("responses: stream", async () => {
  const { said, failed, error } = await exec("hello");
  equal([said, failed], [[text], ""]);
  expect(!error.includes("WebSocket"), error);
});

check("responses: usage", async () => {
  const { events, failed } = await exec("hello");
  const { usage } = events.find((event) => event.type === "turn.completed") ?? { usage: failed };
  expect(usage.input_tokens > 100 && usage.output_tokens === textTokens, usage);
});

check("responses: a command and its result", async () => {
  const { items, said, failed } = await exec("run this command: `echo from-codex`");
  const command = items.find((item) => item.type === "command_execution");
  expect(command?.aggregated_output?.includes("from-codex"), failed || items);
  expect(said.at(-1).startsWith("The tools say:") && said.at(-1).includes("from-codex"), said);
});

check("responses: cached tokens", async () => {
  const home = newHome(provider(), model);
  await exec("hello", { home });
  const { events, failed } = await exec("hello", { home });
  const { usage } = events.find((event) => event.type === "turn.completed") ?? { usage: failed };
  expect(usage.cached_input_tokens > 100, usage);
});

check("WebSocket", async () => {
  const home = newHome(`openai_base_url = "${baseURL}"`, model);
  await run(home, ["login", "--with-api-key"], apiKey);
  const started = Date.now();
  const { said, failed } = await exec("hello", { home });
  equal([said, failed], [[text], ""]);
  expect(Date.now() - started < 4000, `${(Date.now() - started) / 1000} s`);
});

check("error 401", async () => {
  const { failed } = await exec("hello", { config: provider().replace("CODEX_KEY", "MODEL") });
  expect(failed.includes("401"), failed);
});

check("error 404", async () => {
  const { failed } = await exec("hello", { config: provider("request_max_retries = 0\nstream_max_retries = 0"), name: "no-such-model" });
  expect(failed.includes("no-such-model"), failed);
});

await main("@openai/codex");
