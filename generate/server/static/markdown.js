// Markdown to DOM nodes. Text only ever becomes text nodes, so that what a model writes stays text, markup included.

const BLOCK = /^(#{1,6}\s|```|~~~|>\s?|\s*[-*+]\s|\s*\d+[.)]\s|(-{3,}|\*{3,}|_{3,})\s*$)/;
const LINK = /^(https?:|mailto:)/i;
const MOST_DEPTH = 8; // of lists and quotes within one another

function element(name, ...children) {
  const node = document.createElement(name);
  node.append(...children);
  return node;
}

// Code, bold, italic, struck-out text, links and addresses of one run of text, as nodes.
export function inline(text) {
  const out = [];
  const pattern = /(`{1,4})([^]{0,1000}?[^`])\1(?!`)|\*\*([^]{1,1000}?)\*\*|__([^_]{1,1000}?)__|(?<![\w*])\*([^\s*][^*]{0,1000}?)\*|(?<!\w)_([^\s_][^_]{0,1000}?)_(?!\w)|~~([^]{1,1000}?)~~|\[([^\]\n]{1,500})\]\(([^()\s]{1,2000})\)|(https?:\/\/[^\s<>()]+[^\s<>().,;:!?'"])/g;
  let end = 0;
  for (const found of text.matchAll(pattern)) {
    if (found.index > end) out.push(text.slice(end, found.index));
    end = found.index + found[0].length;
    const [whole, , code, bold, bold2, italic, italic2, struck, label, address, bare] = found;
    if (code !== undefined) out.push(element("code", code));
    else if (bold ?? bold2) out.push(element("strong", ...inline(bold ?? bold2)));
    else if (italic ?? italic2) out.push(element("em", ...inline(italic ?? italic2)));
    else if (struck) out.push(element("s", ...inline(struck)));
    else if (LINK.test(address ?? bare)) {
      const link = element("a", label ?? bare);
      link.href = address ?? bare;
      link.rel = "noopener noreferrer nofollow";
      link.target = "_blank";
      out.push(link);
    } else out.push(whole);
  }
  if (end < text.length) out.push(text.slice(end));
  return out;
}

function codeBlock(language, lines) {
  const code = element("code", lines.join("\n"));
  const copy = element("button", "Copy");
  copy.type = "button";
  copy.dataset.action = "copy-code";
  const block = element("div", element("pre", code), copy);
  block.className = "code";
  if (language) {
    const name = element("span", language);
    name.className = "language";
    block.append(name);
  }
  return block;
}

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
}

function table(lines) {
  const [head, , ...rest] = lines;
  const row = (line, name) => element("tr", ...cells(line).map((cell) => element(name, ...inline(cell))));
  return element("table", element("thead", row(head, "th")), element("tbody", ...rest.map((line) => row(line, "td"))));
}

// A list: items begin at the marker's own indent, and deeper lines belong to the item before them.
function list(lines, depth) {
  const marker = /^(\s*)([-*+]|\d+[.)])\s+(.*)$/;
  const [, indent, first] = lines[0].match(marker);
  const out = element(/\d/.test(first) ? "ol" : "ul");
  if (/\d/.test(first)) out.start = parseInt(first, 10) % 1e9;
  let item = [];
  const close = () => {
    if (!item.length) return;
    const [head, ...rest] = item;
    out.append(element("li", ...inline(head), ...blocks(rest, depth + 1)));
  };
  for (const line of lines) {
    const found = line.match(marker);
    if (found && found[1].length <= indent.length) {
      close();
      item = [found[3]];
    } else item.push(line.replace(/^( {1,4}|\t)/, ""));
  }
  close();
  return out;
}

function blocks(lines, depth) {
  const out = [];
  let at = 0;
  const take = (more) => {
    const begin = at++;
    while (at < lines.length && more(lines[at])) at++;
    return lines.slice(begin, at);
  };
  while (at < lines.length) {
    const line = lines[at];
    const fence = line.match(/^\s*(```+|~~~+)\s*([\w+#.-]*)/);
    if (fence) {
      const body = [];
      while (++at < lines.length && !lines[at].trim().startsWith(fence[1])) body.push(lines[at]);
      at++;
      out.push(codeBlock(fence[2], body));
    } else if (/^#{1,6}\s/.test(line)) {
      const [, marks, title] = line.match(/^(#{1,6})\s+(.*?)\s*#*$/) ?? [null, "#", line];
      out.push(element(`h${Math.min(6, marks.length + 1)}`, ...inline(title)));
      at++;
    } else if (/^(-{3,}|\*{3,}|_{3,})\s*$/.test(line)) {
      out.push(element("hr"));
      at++;
    } else if (line.startsWith(">") && depth < MOST_DEPTH) {
      const quoted = take((next) => next.startsWith(">")).map((next) => next.replace(/^>\s?/, ""));
      out.push(element("blockquote", ...blocks(quoted, depth + 1)));
    } else if (/^\s*([-*+]|\d+[.)])\s/.test(line) && depth < MOST_DEPTH) {
      out.push(list(take((next) => /^\s*([-*+]|\d+[.)])\s|^\s{2,}\S/.test(next)), depth));
    } else if (line.includes("|") && /^\s*\|?[\s:|-]*-[\s:|-]*$/.test(lines[at + 1] ?? "") && lines[at + 1].includes("|")) {
      out.push(table(take((next) => next.includes("|"))));
    } else if (!line.trim()) at++;
    else out.push(element("p", ...inline(take((next) => next.trim() && !BLOCK.test(next)).join("\n"))));
  }
  return out;
}

// The nodes of a whole text.
export function markdown(text) {
  return blocks(text.split("\n"), 0);
}
