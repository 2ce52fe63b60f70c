// The verdict on each route, and incidents: what failed or was late, by route and culprit, failures first. Both lead to a
// request that shows the cause.

const SHOWN_INCIDENTS = 8;
const MINUTES = { now: 5, "5m": 5, "1h": 60 };
const INCIDENT_COLUMNS = 6;
const NO_TROUBLE = new Set(["fine", "idle"]);

const incidentRow = (found, now) => {
  const link = el("a", { href: address({ request: found.request_id }), "data-focus": `incident ${found.route} ${found.culprit}` }, found.headline);
  return el(
    "tr", {}, el("td", { class: found.failed ? "name what bad" : "name what" }, link), cell(found.route, "name"), cell(found.gloss, "", found.cause),
    cell(`${age(now - found.since)} ago`, "n soft since"),
    cell(`${age(now - found.last)} ago`, "n soft last-seen"), el("td", { class: "words" }, `${found.evidence}. `, el("em", {}, found.mend)),
  );
};

const showIncidents = ({ incidents }, now) => {
  const rows = incidents.slice(0, SHOWN_INCIDENTS).map((found) => incidentRow(found, now));
  replaceRows(byId("incidents").tBodies[0], rows.length ? rows : [nothing(INCIDENT_COLUMNS, "none: every request met its budgets")]);
  byId("incidents-note").textContent = `last ${MINUTES[viewed().window]} min, failures first${incidents.length > SHOWN_INCIDENTS ? `; the worst ${SHOWN_INCIDENTS}` : ""}`;
};

const verdictItem = (found) => {
  const text = found.request_id
    ? el("a", { href: address({ request: found.request_id }), "data-focus": `verdict ${found.route}` }, found.text) : found.text;
  return el("li", { class: found.state }, text, found.mend ? el("em", {}, ` ${found.mend}`) : null);
};

// Of routes without trouble one line tells.
const showVerdicts = ({ summary, routes }) => {
  const troubled = routes.filter((found) => !NO_TROUBLE.has(found.state));
  const fine = routes.filter((found) => found.state === "fine").map((found) => found.text).join(" · ");
  const items = [...troubled.map(verdictItem), ...(fine ? [el("li", { class: "fine" }, fine)] : [])];
  byId("verdict").className = troubled[0]?.state ?? "fine";
  if (byId("summary").textContent !== summary) byId("summary").textContent = summary; // told once by a screen reader
  replaceRows(byId("verdicts"), items);
};
