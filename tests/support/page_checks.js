// What tests/report/web/test_page_chromium.py asks of a page: window.checks has a function for each question.
window.checks = (() => {
  const start = (one) => one.outerHTML.slice(0, 100);
  const box = (one) => one.getBoundingClientRect();
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];

  // Return the box that the letters of a text can ink. Its client rectangle has the line height of the font, which differs by
  // font: the same page passed with DejaVu and failed with Noto. Texts are written to the right, or upwards.
  const ink = (text) => {
    const [outer, matrix] = [box(text), text.getScreenCTM()];
    const size = Math.hypot(matrix.c, matrix.d) * parseFloat(getComputedStyle(text).fontSize);
    const start = text.getStartPositionOfChar(0).matrixTransform(matrix);
    const [above, below] = [0.78 * size, 0.24 * size];
    return Math.abs(matrix.b) > 1e-6
      ? { left: start.x - above, right: start.x + below, top: outer.top, bottom: outer.bottom }
      : { left: outer.left, right: outer.right, top: start.y - above, bottom: start.y + below };
  };

  // List what is wider than the window or its own box, and texts outside of their plot.
  const overflow = () => {
    const wide = all("body *").filter((one) => !one.closest("svg") && one.id !== "tip" && one.checkVisibility() && box(one).right > innerWidth + 1);
    const cut = all(".wide, .sample, .panel, td, th").filter((one) => one.clientWidth && one.scrollWidth > one.clientWidth + 1);
    const texts = all("svg.plot text").filter((one) => one.textContent.trim() && one.checkVisibility()).filter((one) => {
      const [text, plot] = [ink(one), box(one.closest("svg"))];
      return text.left < plot.left - 2 || text.right > plot.right + 2 || text.bottom > plot.bottom + 1;
    });
    const page = document.documentElement.scrollWidth > innerWidth ? ["the page"] : [];
    return [...page, ...wide.map(start), ...cut.map(start), ...texts.map((one) => one.textContent)];
  };

  // List pairs of texts of one plot whose letters overlap.
  const collisions = () => all("svg.plot").flatMap((plot) => {
    const texts = all("text", plot).filter((one) => one.textContent.trim() && one.checkVisibility()).map((one) => [one.textContent, ink(one)]);
    const overlap = (one, other) => Math.min(one.right, other.right) - Math.max(one.left, other.left) > 1.5
      && Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top) > 0.5;
    return texts.flatMap(([name, one], index) => texts.slice(index + 1).filter(([, other]) => overlap(one, other)).map(([other]) => [name, other]));
  });

  // Count the texts, and list those of a contrast below 4.5 (WCAG AA), and lines and marks below `least`.
  const channels = (text) => {
    const values = text.match(/[\d.]+(e-?\d+)?/g).map(Number);
    return text.startsWith("color(") ? values.map((value, index) => (index < 3 ? 255 * value : value)) : values;
  };
  const luminance = (colour) => {
    const [red, green, blue] = channels(colour).map((value) => value / 255).map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const contrast = (first, second) => {
    const [one, other] = [luminance(first), luminance(second)];
    return (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
  };
  const ground = (one) => {
    for (let element = one; element; element = element.parentElement) {
      const colour = getComputedStyle(element).backgroundColor;
      if (channels(colour).length < 4) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const contrasts = (least) => {
    const low = [];
    let texts = 0;
    const judge = (one, colour, behind, limit) => {
      const value = contrast(colour, behind);
      if (value < limit) low.push([value.toFixed(2), start(one)]);
    };
    for (const one of all("body *")) {
      if (!one.getClientRects().length || one.closest("script, option")) continue;
      const [style, plot] = [getComputedStyle(one), one.closest("svg")];
      if ([...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim())) {
        texts += 1;
        const behind = one.matches(".on-dark, .on-pale") ? getComputedStyle(one.previousElementSibling).fill : ground(plot ?? one);
        judge(one, plot ? style.fill : style.color, behind, 4.5);
      } else if (one.matches("svg .line, svg .mark:not(.quiet)")) judge(one, style.color, ground(plot), least);
    }
    return [texts, low];
  };
  return { overflow, collisions, contrasts };
})();
