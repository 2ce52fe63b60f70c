// Explain, and the loop that looks.

const candidateRow = (found) =>
  el(
    "tr", { class: found.chosen ? "chosen" : null },
    cell(`${found.rank}`), cell(found.endpoint, "mono"), cell(`${found.tier}`), cell(ms(found.ttft_p50_ms)),
    cell(ms(found.ttft_p90_ms)), cell(found.chance.toFixed(3)), cell(`${found.hit_tokens} / ${found.prompt_tokens}`),
    cell(`${found.tokens_ahead}`), cell(`${found.running} + ${found.waiting}`), cell(`$${found.price_usd.toFixed(6)}`),
    cell(`${found.chosen ? "chosen: " : ""}${found.reason}`, "words"),
  );
const rejectedRow = (found) =>
  el(
    "tr", {}, cell("–"), cell(found.endpoint ?? found.pool, "mono"), cell(`${found.tier}`),
    el("td", { class: "words", colspan: 8 }, `rejected: ${found.reason}`),
  );
const believedRow = ([endpoint, found]) =>
  el(
    "tr", {}, cell("–"), cell(endpoint, "mono"), cell(""),
    el("td", { class: "words", colspan: 8 }, `believed: ${beliefText(found)}`),
  );
const HEADING = [
  ["", "n"], ["endpoint", ""], ["tier", "n"], ["p50", "n"], ["p90", "n"], ["chance", "n"], ["hit / prompt", "n"],
  ["ahead", "n"], ["run + wait", "n"], ["price", "n"], ["why", ""],
];

const decisionOf = (said) => {
  const left = said.budget_left_ms === null ? "no TTFT budget" : `${ms(said.budget_left_ms)} left for the first token`;
  const heading = el("tr", {}, ...HEADING.map(([name, kind]) => el("th", { scope: "col", class: kind }, name)));
  const beliefs = Object.entries(said.believed).flatMap(([endpoint, found]) => found.map((each) => [endpoint, each]));
  const rows = [
    ...said.candidates.map(candidateRow), ...said.rejected.map(rejectedRow), ...beliefs.map(believedRow),
  ];
  return [
    el("p", {}, el("span", { class: "name" }, said.outcome), `: ${said.reason}. ${left}; `,
      `${said.expected_output_tokens} tokens of answer expected.`,
      said.held_by ? ` Held by ${said.held_by.rule}; freed by ${said.held_by.freed_by}.` : ""),
    el("div", { class: "wide" }, el("table", {}, el("thead", {}, heading), el("tbody", {}, ...rows))),
  ];
};

const explain = async () => {
  const headers = { "content-type": "application/json" };
  if (byId("key").value) headers.authorization = `Bearer ${byId("key").value}`;
  const path = encodeURIComponent(byId("path").value);
  try {
    const reply = await fetch(`explain?path=${path}`, { method: "POST", headers, body: byId("request").value });
    const said = await reply.json();
    byId("answer").replaceChildren(...(reply.ok ? decisionOf(said) : [el("p", { class: "bad" }, said.error.message)]));
  } catch {
    byId("answer").replaceChildren(el("p", { class: "bad" }, "The gateway does not answer."));
  }
};

// ---------------------------------------------------------------- looking

const EVERY = 2000; // ms between two looks
const status = (kind, text) => Object.assign(byId("status"), { className: kind, textContent: text });
const asked = async (path) => {
  const reply = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(5000) });
  if (!reply.ok) throw new Error(`HTTP ${reply.status}`);
  return reply.json();
};

let begun = false; // figures have been shown
const look = async () => {
  const now = viewed();
  const [verdicts, routes, fleet, prefixes, incidents, misses, linked] = await Promise.all([
    asked(`verdicts?window=${now.window}`), asked(`windows?window=${now.window}`), asked("fleet"), asked("prefixes"), asked(`incidents?minutes=${MINUTES[now.window]}`), asked(missesQuery(now, { worst: SHOWN })).catch(() => null),
    now.request ? asked(`requests?id=${encodeURIComponent(now.request)}`).catch(() => []) : [],
  ]);
  const reading = !getSelection().isCollapsed && begun; // what is being marked must not be replaced
  if (!byId("request").value) {
    const model = routes.routes[0]?.route ?? "model";
    byId("request").value = JSON.stringify({ model, stream: true, messages: [{ role: "user", content: "hello" }] }, null, 1);
  }
  if (!reading) {
    showVerdicts(verdicts);
    showRoutes(routes);
    showFleet(fleet);
    showPrefixes(prefixes);
    showFilters(routes, fleet, misses ?? []);
    showIncidents(incidents, routes.at);
    showMisses(misses, linked.at(-1), routes.at);
    begun = true;
  }
  status("live", reading ? "paused while text is marked" : "live");
};

// A link to a request, or with a filter, is to single requests, which are among "more".
const openLinked = () => {
  const { request, filters } = viewed();
  if (request || Object.values(filters).some(Boolean)) byId("more").open = true;
};

let timer = null;
const lookForever = async () => {
  clearTimeout(timer);
  timer = null;
  try {
    if (document.visibilityState === "visible") await look();
  } catch (error) {
    status("gone", `the gateway has gone away and is tried again (${error.message})`);
  }
  clearTimeout(timer);
  timer = setTimeout(lookForever, begun ? EVERY : 500);
};

const legend = GROUPS.flatMap(([group, text]) => [el("span", { class: `key square s-${group}` }), text]);
byId("stages").append(...legend, el("span", { class: "key mark" }), "budget");
byId("go").addEventListener("click", explain);
addEventListener("hashchange", () => {
  openLinked();
  lookForever();
});
openLinked();
for (const name of FILTERS) byId(`filter-${name}`).addEventListener("change", (event) => view({ [name]: event.target.value, request: "" }));
for (const radio of document.getElementsByName("window")) radio.addEventListener("change", () => view({ window: radio.value }));
lookForever();
