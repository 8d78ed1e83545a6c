// Opens a page in a real Chromium without any network, on a phone and on a desktop, in light and in dark, and writes
// what it found as JSON. Arguments: the file, a directory for screenshots.
import { pathToFileURL } from "node:url";
import chromium from "@sparticuz/chromium";
import { chromium as playwright } from "playwright-core";

const VIEWPORTS = { phone: { width: 390, height: 844 }, desktop: { width: 1280, height: 900 } };
// A picture may not be higher than a texture.
const PIECE = 4000;
const [file, screenshots] = process.argv.slice(2);

// Runs in the page: what sticks out of it, and text that is hard to read (WCAG 2.2, 1.4.3).
function inspect() {
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
  const faint = [];
  let texts = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.data.trim();
    const element = walker.currentNode.parentElement;
    if (!text || !element.checkVisibility() || element.closest("title, desc")) continue;
    const style = getComputedStyle(element);
    const front = luminance(parsed(element.closest("svg") ? style.fill : style.color));
    const back = luminance(behind(element));
    const contrast = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    texts += 1;
    if (contrast < (large ? 3 : 4.5)) faint.push({ text: text.slice(0, 60), contrast });
  }
  const wide = [...document.body.querySelectorAll("*")].filter(
    (element) =>
      !element.closest(".scroll") && element.checkVisibility() && element.getBoundingClientRect().right > innerWidth + 0.5,
  );
  return {
    texts,
    faint,
    wide: wide.map((element) => element.outerHTML.slice(0, 120)),
    scrollWidth: document.documentElement.scrollWidth,
    clientWidth: document.documentElement.clientWidth,
    smallestText: Math.min(
      ...[...document.querySelectorAll("figure svg text")].map((text) => text.getBoundingClientRect().height),
    ),
    background: getComputedStyle(document.body).backgroundColor,
    scripts: document.scripts.length,
  };
}

async function look(browser, name, viewport, colorScheme) {
  const context = await browser.newContext({ viewport, colorScheme });
  await context.setOffline(true);
  const page = await context.newPage();
  const complaints = [];
  const requests = [];
  page.on("console", (message) => complaints.push(message.text()));
  page.on("pageerror", (error) => complaints.push(String(error)));
  page.on("dialog", (dialog) => complaints.push(`dialog: ${dialog.message()}`) && dialog.dismiss());
  page.on("request", (request) => requests.push(request.url()));
  const url = pathToFileURL(file).href;
  await page.goto(url, { waitUntil: "load" });
  const found = await page.evaluate(inspect);
  const height = await page.evaluate(() => document.documentElement.scrollHeight);
  for (let y = 0, part = 0; y < height; y += PIECE, part += 1) {
    const clip = { x: 0, y, width: viewport.width, height: Math.min(PIECE, height - y) };
    await page.screenshot({ path: `${screenshots}/${name}-${colorScheme}-${part}.png`, fullPage: true, clip });
  }
  await context.close();
  const others = requests.filter((each) => each !== url && !each.startsWith("data:"));
  return { ...found, name: `${name}-${colorScheme}`, complaints, requests: others };
}

// What is made for a lambda function, one process and no rules between origins, would not be what people have.
const strange = ["--single-process", "--disable-web-security", "--allow-running-insecure-content"];
const args = chromium.args.filter((each) => !strange.includes(each));
const browser = await playwright.launch({ args, executablePath: await chromium.executablePath() });
try {
  const looks = [];
  for (const [name, viewport] of Object.entries(VIEWPORTS)) {
    for (const scheme of ["light", "dark"]) looks.push(await look(browser, name, viewport, scheme));
  }
  process.stdout.write(JSON.stringify(looks));
} finally {
  await browser.close();
}
