// Runs in a page: what sticks out of it, and text that is hard to read (WCAG 2.2, 1.4.3).
() => {
  const parsed = (colour) => {
    const [r, g, b, a = 1] = colour.match(/[\d.]+/g).map(Number);
    return { r, g, b, a };
  };
  const luminance = ({ r, g, b }) => {
    const [x, y, z] = [r, g, b].map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const colour = parsed(getComputedStyle(each).backgroundColor);
      if (colour.a === 1) return colour;
    }
    return { r: 255, g: 255, b: 255 };
  };
  const scrolls = (element) => {
    for (let each = element.parentElement; each && each !== document.body; each = each.parentElement) {
      if (each.matches(".scroll") || /auto|scroll/.test(getComputedStyle(each).overflowX)) return true;
    }
    return element.matches(".scroll");
  };
  const lowContrast = [];
  const sizes = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.data.trim();
    const element = walker.currentNode.parentElement;
    if (!text || !element.checkVisibility() || element.closest("title, desc, script, style, noscript")) continue;
    const style = getComputedStyle(element);
    const drawn = element.closest("svg");
    const front = luminance(parsed(drawn ? style.fill : style.color));
    const back = luminance(behind(element));
    const contrast = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    sizes.push(drawn ? element.getBoundingClientRect().height : size);
    if (contrast < (large ? 3 : 4.5)) lowContrast.push({ text: text.slice(0, 60), contrast });
  }
  const overflowing = [...document.body.querySelectorAll("*")].filter(
    (element) =>
      element.checkVisibility() && element.getBoundingClientRect().right > innerWidth + 0.5 && !scrolls(element),
  );
  return {
    texts: sizes.length,
    lowContrast,
    overflowing: overflowing.map((element) => element.outerHTML.slice(0, 120)),
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    smallest_text: Math.min(...sizes),
    background: getComputedStyle(document.body).backgroundColor,
    scripts: document.scripts.length,
  };
}
