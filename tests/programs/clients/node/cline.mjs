// Cline's command line, without a terminal. All settings are those of docs/agents.md.
import { check, EDIT, edited, ended, expect, main, newHome, paste, settled, text } from "./harness.mjs";

const program = new URL("node_modules/.bin/cline", import.meta.url).pathname;

async function cline(prompt, home = newHome("cline")) {
  const env = { ...paste("cline", home), CLINE_SESSION_BACKEND_MODE: "local" }; // no process stays
  const [login] = settled("cline").split(" && ");
  await ended("sh", ["-c", login.replace(/^cline/, program)], { env, cwd: home });
  return await ended(program, ["--json", "--timeout", "20", prompt], { env, cwd: home });
}

check("chat: stream", async () => {
  const { out, error } = await cline("hello there");
  expect(out.includes(text), out + error);
});

check("a file is edited", async () => {
  const home = newHome("cline");
  await cline(EDIT, home);
  edited(home);
});

await main("cline");
