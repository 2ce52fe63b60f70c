// Misses: requests that missed a budget or failed, by the time over; a row opens to the diagnosis of `firsttoken why`.

const SHOWN = 15;
const COLUMNS = 9;

const GROUPS = [
  ["gateway", "gateway"], ["queue", "held back, rate limits"], ["lost", "lost attempts"], ["connect", "connect"],
  ["engine_queue", "engine queue"], ["upstream", "engine"],
];
const GROUP_OF = { queue: "queue", rate_limit: "queue", failover: "lost", connect: "connect", upstream: "upstream" };
const PARTS = new Set(["engine_queue", "engine_prefill", "stream"]); // of another stage, or after the first token

const spentBy = (record) => {
  const groups = {};
  for (const [stage, spent] of Object.entries(record.stages_ms)) {
    const group = GROUP_OF[stage] ?? "gateway";
    if (!PARTS.has(stage)) groups[group] = (groups[group] ?? 0) + spent;
  }
  const queued = Math.min(record.engine_queue_ms ?? record.stages_ms.engine_queue ?? 0, groups.upstream ?? 0);
  if (queued) Object.assign(groups, { engine_queue: queued, upstream: groups.upstream - queued });
  return groups;
};

const stageBar = (record, longest) => {
  const groups = spentBy(record);
  const stages = Object.entries(record.stages_ms).filter(([stage]) => stage !== "stream");
  const said = stages.map(([stage, spent]) => `${stage} ${ms(spent)}`).join(", ");
  let from = 0;
  const rects = GROUPS.filter(([group]) => groups[group]).map(([group]) => {
    const width = (groups[group] / longest) * 300;
    from += width;
    return svg("rect", { class: `s-${group}`, x: from - width, width, height: 12 });
  });
  const budget = record.ttft_budget_ms;
  const at = budget === null ? null : (budget / longest) * 300;
  return svg(
    "svg", { class: "bar", viewBox: "0 0 300 12", role: "img", "aria-label": said },
    svg("title", {}, said), svg("rect", { class: "track", width: 300, height: 12 }), ...rects,
    at === null || at > 299 ? null : svg("line", { class: "tick", x1: at, x2: at, y1: 0, y2: 12 }),
  );
};

const causes = (record) => record.attempts.filter((attempt) => attempt.cause)
  .map((attempt) => `attempt ${attempt.number}: ${attempt.cause}`).join("; ");

const tableOf = (heading, rows) =>
  el("div", { class: "wide" }, el(
    "table", {},
    el("thead", {}, el("tr", {}, ...heading.map(([name, kind]) => el("th", { scope: "col", class: kind }, name)))),
    el("tbody", {}, ...rows),
  ));

const stageTable = (record, usual) => {
  const stages = Object.entries(record.stages_ms).filter(([, spent]) => spent >= 0.1);
  const most = Math.max(...stages.map(([, spent]) => spent), 1);
  const rows = stages.map(([stage, spent]) => {
    const bar = svg(
      "svg", { class: "bar short", viewBox: "0 0 150 12", role: "img", "aria-label": ms(spent) },
      svg("rect", { class: `s-${GROUP_OF[stage] ?? "gateway"}`, width: (spent / most) * 150, height: 12 }),
    );
    const [p50, p90] = usual[stage] ?? [null, null];
    return el("tr", {}, cell(stage, "name"), el("td", {}, bar), cell(ms(spent)), cell(ms(p50), "n soft"), cell(ms(p90), "n soft"));
  });
  return tableOf([["stage", ""], ["", ""], ["took", "n"], ["usual p50", "n"], ["p90", "n"]], rows);
};

const alternativesTable = (candidates, went) =>
  tableOf(
    [["decided among", ""], ["p50", "n"], ["p90", "n"], ["hit", "n"], ["ahead", "n"], ["price", "n"]],
    candidates.map((each) => el(
      "tr", { class: each.endpoint === went ? "chosen" : null },
      cell(each.endpoint, "mono"), cell(ms(each.ttft_p50_ms)), cell(ms(each.ttft_p90_ms)), cell(`${each.hit_tokens}`),
      cell(`${each.tokens_ahead}`), cell(`$${each.price_usd.toFixed(4)}`),
    )),
  );

// The parts of the stage `upstream`; empty where the reply was not seen, as behind another proxy.
const replyText = (record) => {
  const [upstream, head, byte] = [record.stages_ms.upstream, record.head_ms ?? null, record.first_byte_ms ?? null];
  if (upstream === undefined || head === null || byte === null || record.ttft_ms === null) return "";
  const first = record.ttft_ms - (record.stages_ms.relay ?? 0);
  const parts = [head - first + upstream, byte - head, first - byte].map((part) => ms(Math.max(part, 0)));
  return `; upstream: head of the reply ${parts[0]}, then first byte ${parts[1]}, then first token ${parts[2]}`;
};

const attemptText = (each) =>
  `attempt ${each.number}, ${each.kind}, ${each.endpoint}, ${ms(each.opened_ms)} to ${ms(each.ended_ms)}: ${each.ending}` +
  `, ${each.status || "no reply"}${each.cause ? `, ${each.cause}` : ""}`;

const opened = (record) => {
  const why = record.why;
  const said = `${record.end} ${record.status}; first token after ${ms(record.ttft_ms)}, forecast ${ms(record.ttft_predicted_p50_ms)}` +
    ` to ${ms(record.ttft_predicted_p90_ms)}; prompt ${record.prompt_tokens_reported ?? record.prompt_tokens_estimated ?? "–"} tokens` +
    `, ${record.cached_tokens_reported ?? "–"} cached, ${record.cached_tokens_predicted ?? "–"} forecast; answer ${record.output_tokens ?? 0}` +
    ` tokens, TPOT ${ms(record.tpot_ms)}, longest gap ${ms(record.longest_gap_ms)}` +
    (record.reasoning_effort ? `, reasoning effort ${record.reasoning_effort}` : "") + replyText(record);
  return [
    el("p", {}, el("b", {}, why ? why.cause : "met its budgets"), why ? `: ${why.evidence}. ` : "", why ? el("em", {}, why.mend) : ""),
    el("p", { class: "soft" }, said),
    el("div", { class: "pair" }, stageTable(record, why?.usual_ms ?? {}),
      why?.candidates.length ? alternativesTable(why.candidates, record.endpoint) : ""),
    ...record.attempts.map((each) => el("p", { class: "soft" }, attemptText(each))),
    el("p", { class: "mono soft" }, `firsttoken why ${record.request_id}`),
  ];
};

const missRow = (record, longest, now, open) => {
  const [id, why] = [record.request_id, record.why];
  const toggle = el(
    "button", { type: "button", class: "toggle", "aria-expanded": open, "data-focus": `open ${id}`, "aria-label": `${why.cause}, request ${id}` },
    open ? "▾ " : "▸ ", why.cause,
  );
  toggle.addEventListener("click", () => view({ request: open ? "" : id }));
  const row = el(
    "tr", { class: open ? "told" : null },
    el("td", { class: "name" }, toggle), cell(`${age(now - record.wall - record.total_ms / 1000)} ago`, "n soft"), cell(record.route, "name"), cell(record.tenant, ""),
    cell(record.endpoint, "mono", causes(record) || null), cell(why.failed ? "failed" : ms(why.over_ms), "n bad"),
    cell(record.ttft_ms === null ? `none in ${ms(record.total_ms)}` : ms(record.ttft_ms), "n", `budget ${ms(record.ttft_budget_ms)}`),
    el("td", {}, stageBar(record, longest)), el("td", { class: "mono soft" }, el("a", { href: address({ request: id }), "data-focus": `link ${id}` }, id)),
  );
  return open ? [row, el("tr", {}, el("td", { class: "opened", colspan: COLUMNS }, ...opened(record)))] : [row];
};

const missesQuery = ({ window, filters }, more) => {
  const within = { now: 300, "5m": 300, "1h": 3600 }[window];
  const given = Object.entries(filters).filter(([, value]) => value);
  return `requests?${new URLSearchParams([["within", within], ...given, ...Object.entries(more)])}`;
};

// `linked`: the request of the address, which may be of another window, or no miss at all. `found` null: the gateway does
// not know a filter of the address, as of a route that a reload has renamed.
const showMisses = (found, linked, now) => {
  const records = found ?? [];
  const { request, window } = viewed();
  const all = linked && linked.why && !records.some((one) => one.request_id === request) ? [linked, ...records] : records;
  const longest = Math.max(...all.map((record) => record.ttft_ms ?? record.total_ms), 1);
  const rows = all.flatMap((record) => missRow(record, longest, now, record.request_id === request));
  const gone = request && !all.some((one) => one.request_id === request);
  const text = linked && gone ? opened(linked) : [`no recent miss has the id ${request}: the access log has its cause`];
  if (gone) rows.unshift(el("tr", {}, el("td", { class: "opened", colspan: COLUMNS }, ...text)));
  replaceRows(byId("misses").tBodies[0], rows.length ? rows : [nothing(COLUMNS, found ? "nothing missed its budgets or failed" : "a filter names what is not there")]);
  const span = WINDOWS[window === "now" ? "5m" : window];
  byId("misses-note").textContent = `${span}; single requests: failures, then most time over the budget${records.length === SHOWN ? `; the worst ${SHOWN}` : ""}`;
};

const seenKeys = new Set();
const showFilters = (kept, fleet, records) => {
  for (const record of records) seenKeys.add(record.tenant);
  const { window, filters } = viewed();
  const choices = {
    route: kept.routes.map((route) => route.route),
    key: [...seenKeys].sort(),
    endpoint: fleet.map((entry) => entry.endpoint.id),
    cause: [...new Set(kept.routes.flatMap((route) => Object.keys(route.causes)))].sort(),
  };
  for (const name of FILTERS) {
    const list = byId(`filter-${name}`);
    const wanted = ["", ...new Set([...choices[name], filters[name]].filter(Boolean))];
    if (wanted.join("\n") !== [...list.options].map((option) => option.value).join("\n")) {
      list.replaceChildren(...wanted.map((value) => el("option", { value }, value || "all")));
    }
    list.value = filters[name];
  }
  for (const radio of document.getElementsByName("window")) radio.checked = radio.value === window;
  for (const form of ["json", "csv"]) byId(`export-${form}`).href = missesQuery(viewed(), { worst: 500, format: form });
  const counts = {};
  for (const route of kept.routes) for (const [cause, n] of Object.entries(route.causes)) counts[cause] = (counts[cause] ?? 0) + n;
  const said = Object.entries(counts).filter(([, n]) => n).sort((a, b) => b[1] - a[1]).map(([cause, n]) => `${cause} ${n.toFixed(0)}`);
  byId("causes").textContent = said.join(" · ");
};
