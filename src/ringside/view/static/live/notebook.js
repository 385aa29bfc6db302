// The live view of a notebook (see notebook.py): draws the state, and asks for a newer one while it can be seen.

const EVERY_MS = 1000;
const COLUMNS = ["rank", "host", "own", "wait", "wire", "excess", "own time", "verdict"];

// Only ever text, never markup: names come from whoever ran the job.
function element(name, className, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

function verdict({ headline, over, told }) {
  const rows = told.flatMap(([name, words]) => [element("dt", "", name), element("dd", "", words)]);
  return element("section", over ? "over" : "open", element("strong", "", headline), element("dl", "", ...rows));
}

function row(one) {
  const cells = [one.rank, one.host, one.own, one.wait, one.wire, one.excess, one.spark, one.verdict];
  const made = element("tr", one.verdict ? "named" : "", ...cells.map((text) => element("td", "", String(text))));
  made.children[6].className = "spark";
  return made;
}

function draw(root, state) {
  const heads = element("tr", "", ...COLUMNS.map((name) => element("th", "", name)));
  const table = element("table", "", element("thead", "", heads), element("tbody", "", ...state.ranks.map(row)));
  if (state.more) table.append(element("caption", "", `and ${state.more} ranks that are less slow`));
  const told = state.remark ? [element("p", "", state.remark)] : state.verdicts.map(verdict);
  root.replaceChildren(element("h4", "", state.title), ...told, element("p", "meaning", state.own_time), table);
}

function render({ model, el }) {
  const root = element("div", "ringside");
  el.append(root);
  const show = () => draw(root, model.get("state"));
  model.on("change:state", show);
  const timer = setInterval(() => { if (!document.hidden) model.send("look"); }, EVERY_MS);
  show();
  return () => { clearInterval(timer); model.off("change:state", show); };
}

export default { render };
