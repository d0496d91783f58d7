// A message of the conversation as an element.

import { markdown } from "/static/markdown.js";

function button(action, label) {
  const node = document.createElement("button");
  node.type = "button";
  node.dataset.action = action;
  node.textContent = label;
  return node;
}

// Puts what a message says by now into its element. A fold that the reader opened stays open.
export function drawn(node, message) {
  const open = node.querySelector("details")?.open ?? false;
  const parts = [];
  if (message.reasoning) {
    const fold = document.createElement("details");
    const title = document.createElement("summary");
    const text = document.createElement("div");
    title.textContent = message.content ? "Reasoning" : "Reasoning …";
    text.textContent = message.reasoning;
    fold.open = open;
    fold.append(title, text);
    parts.push(fold);
  }
  if (message.role === "user") parts.push(message.content);
  else parts.push(...markdown(message.content));
  node.querySelector(".body").replaceChildren(...parts);
}

export function article(message, index) {
  const node = document.createElement("article");
  node.className = message.role;
  node.dataset.index = index;
  node.setAttribute("aria-label", message.role === "user" ? "You" : "Assistant");
  const body = document.createElement("div");
  body.className = "body";
  const tools = document.createElement("div");
  tools.className = "tools";
  tools.append(button("copy", "Copy"));
  if (message.role === "user") tools.append(button("edit", "Edit"));
  else tools.append(button("regenerate", "Regenerate"));
  node.append(body, tools);
  drawn(node, message);
  return node;
}
