/* Draws the figures of a page, keeps them in the page's colours, and the few things that a form alone cannot do.
   No inline scripts anywhere: pages carry data in <script type="application/json"> elements. */
(function () {
  "use strict";

  // A custom property like --ink holds light-dark(…): only a real element tells the colour it comes to.
  const probe = document.createElement("span");
  probe.hidden = true;
  function colour(name) {
    if (!probe.isConnected) document.body.append(probe);
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  }

  // "@series-1" in a figure means that custom property; "@series-1/0.2" the same with an opacity.
  function coloured(value) {
    if (typeof value === "string" && value.startsWith("@")) {
      const [name, opacity] = value.slice(1).split("/");
      const found = colour(name);
      return opacity ? found.replace(/^rgba?\(([^,]+),([^,]+),([^,)]+).*$/, `rgba($1,$2,$3,${opacity})`) : found;
    }
    if (Array.isArray(value)) return value.map(coloured);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, coloured(inner)]));
    }
    return value;
  }

  function axis(own) {
    return Object.assign({
      gridcolor: colour("line"), linecolor: colour("line-strong"), zeroline: false, automargin: true,
      tickfont: { color: colour("ink-soft"), size: 11 }, title: { font: { color: colour("ink-soft"), size: 12 } },
      separatethousands: true, fixedrange: true,
    }, own, { title: Object.assign({ font: { color: colour("ink-soft"), size: 12 }, standoff: 8 }, own && own.title) });
  }

  function draw(plot) {
    const source = document.getElementById(plot.dataset.figure);
    if (!source || !window.Plotly) return;
    const figure = coloured(JSON.parse(source.textContent));
    const own = figure.layout || {};
    const layout = Object.assign({}, own, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, color: colour("ink"), size: 12 },
      margin: Object.assign({ l: 8, r: 12, t: 12, b: 8 }, own.margin),
      xaxis: axis(own.xaxis), yaxis: axis(own.yaxis),
      hoverlabel: { bgcolor: colour("sheet"), bordercolor: colour("line-strong"), font: { color: colour("ink"), size: 12 } },
      legend: Object.assign({ orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12 } }, own.legend),
    });
    window.Plotly.react(plot, figure.data, layout, { displayModeBar: false, responsive: true });
  }

  function drawAll() { document.querySelectorAll(".plot[data-figure]").forEach(draw); }

  // One line tells a screen reader how far things are; it changes only when the words do.
  function announce() {
    const news = document.querySelector("[data-announce]");
    const line = document.getElementById("announcement");
    if (news && line && line.textContent !== news.dataset.announce) line.textContent = news.dataset.announce;
  }

  document.addEventListener("click", (event) => {
    const toggle = event.target.closest("[data-toggle-menu]");
    if (toggle) {
      const open = document.getElementById("side-more").classList.toggle("open");
      toggle.setAttribute("aria-expanded", String(open));
    }
    const copy = event.target.closest("[data-copy]");
    if (copy) {
      navigator.clipboard.writeText(document.getElementById(copy.dataset.copy).textContent.trim()).then(() => {
        copy.textContent = copy.dataset.copied;
      });
    }
    if (event.target.closest("[data-print]")) window.print();
  });

  // A form that is on its way is not sent twice.
  document.addEventListener("submit", (event) => {
    const form = event.target;
    if (form.dataset.sent) { event.preventDefault(); return; }
    if (form.method === "post" && !form.dataset.download) form.dataset.sent = "yes";
  });
  window.addEventListener("pageshow", () => document.querySelectorAll("form[data-sent]").forEach((form) => delete form.dataset.sent));

  document.addEventListener("htmx:afterSettle", () => { drawAll(); announce(); });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  document.addEventListener("DOMContentLoaded", () => { drawAll(); announce(); });
  if (document.readyState !== "loading") { drawAll(); announce(); }
})();
