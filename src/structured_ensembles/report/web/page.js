"use strict";
(() => {
  const make = (tag, properties, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };

  // Tables: sort by a click on a title (or the list that cards have), filter by words.
  const compare = (first, second) => {
    if (first === "" || second === "") return first === second ? 0 : first === "" ? 1 : -1; // missing values last
    const numbers = [Number(first), Number(second)];
    return numbers.some(Number.isNaN) ? first.localeCompare(second, undefined, { numeric: true }) : numbers[0] - numbers[1];
  };
  const sort = (table, column, descending) => {
    const body = table.tBodies[0];
    const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const rows = [...body.rows].sort((first, second) => {
      const order = compare(value(first), value(second));
      return descending && value(first) !== "" && value(second) !== "" ? -order : order;
    });
    body.append(...rows);
    [...table.tHead.rows[0].cells].forEach((title, index) =>
      index === column ? title.setAttribute("aria-sort", descending ? "descending" : "ascending") : title.removeAttribute("aria-sort"));
  };
  for (const table of document.querySelectorAll("table.data")) {
    const titles = [...table.tHead.rows[0].cells];
    titles.forEach((title, column) => title.firstElementChild.addEventListener("click", () =>
      sort(table, column, title.getAttribute("aria-sort") === "ascending")));
    const tools = make("div", { className: "tools" });
    if ("filter" in table.dataset) {
      const count = make("span", {});
      count.setAttribute("role", "status");
      const input = make("input", { type: "search", placeholder: "filter rows" });
      input.setAttribute("aria-label", "filter rows");
      input.addEventListener("input", () => {
        const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
        const rows = [...table.tBodies[0].rows];
        for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
        const left = rows.filter((row) => !row.hidden).length;
        count.textContent = words.length ? `${left} of ${rows.length} rows` : "";
      });
      tools.append(input, count);
    }
    if (table.tBodies[0].rows.length > 1) {
      const options = titles.flatMap((title, column) => [["▲", 0], ["▼", 1]].map(([arrow, descending]) =>
        make("option", { value: `${column} ${descending}` }, `${title.textContent} ${arrow}`)));
      const select = make("select", {}, make("option", { value: "" }, "as it is"), ...options);
      select.addEventListener("change", () => {
        const [column, descending] = select.value.split(" ").map(Number);
        if (select.value) sort(table, column, descending === 1);
      });
      tools.append(make("label", { className: `order ${table.className}` }, "sort by ", select));
    }
    if (tools.children.length) table.closest(".wide").before(tools);
  }

  // Charts: the text of the mark that is pointed at, or chosen with the arrow keys.
  const tip = make("div", { id: "tip", hidden: true });
  document.body.append(tip);
  let shown = null;
  const hide = () => { shown?.classList.remove("on"); shown = null; tip.hidden = true; };
  const show = (mark, x, y) => {
    if (mark !== shown) { hide(); shown = mark; mark.classList.add("on"); tip.textContent = mark.dataset.tip; tip.hidden = false; }
    const [width, height] = [tip.offsetWidth, tip.offsetHeight];
    tip.style.left = `${Math.max(4, Math.min(x + 12, document.documentElement.clientWidth - width - 4))}px`;
    tip.style.top = `${y - height - 12 < 4 ? y + 16 : y - height - 12}px`;
  };
  const nearest = (plot, event) => {
    const box = plot.getBoundingClientRect();
    const scale = plot.viewBox.baseVal.width / box.width;
    const [x, y] = [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
    let best = null, reach = 22;
    for (const mark of plot.querySelectorAll(".mark")) {
      const distance = Math.hypot(mark.dataset.x - x, mark.dataset.y - y);
      if (distance < reach) { reach = distance; best = mark; }
    }
    return best;
  };
  const point = (event) => {
    const target = event.target instanceof Element ? event.target : null;
    const plot = target?.closest("svg.plot");
    const mark = target?.closest("[data-tip]:not(.mark)") ?? (plot ? nearest(plot, event) : null);
    mark ? show(mark, event.clientX, event.clientY) : hide();
  };
  document.addEventListener("pointermove", point);
  document.addEventListener("pointerdown", point);
  document.addEventListener("scroll", hide, { passive: true });
  document.addEventListener("keydown", (event) => {
    const plot = document.activeElement?.closest?.("svg.plot");
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") hide();
    if (!plot || !step) return;
    const marks = [...plot.querySelectorAll("[data-tip]")];
    if (!marks.length) return;
    const mark = marks[(Math.max(marks.indexOf(shown), step > 0 ? -1 : 0) + step + marks.length) % marks.length];
    const box = mark.getBoundingClientRect();
    show(mark, box.left + box.width / 2, box.top);
    event.preventDefault();
  });
  document.addEventListener("focusout", hide);
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((details) => { details.open = true; }));
})();
