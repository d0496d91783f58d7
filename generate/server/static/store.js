// Conversations and settings in the browser's own storage.
//
// A conversation: {id, title, changed, messages: [{role, content, reasoning?, figures?}]}

const PREFIX = "bimetal:";
const MOST_IMPORTED = 2000; // conversations of a file
const ROLES = ["user", "assistant"];

export function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

// Returns whether there was room.
export function write(name, value) {
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export function blank() {
  return { id: crypto.randomUUID?.() ?? String(Math.random()).slice(2), title: "", changed: Date.now(), messages: [] };
}

export function titled(conversation) {
  const first = conversation.messages.find((message) => message.role === "user");
  return conversation.title || first?.content.trim().split("\n")[0].slice(0, 60) || "New conversation";
}

export function exported(conversations) {
  return JSON.stringify({ format: "bimetal conversations", version: 1, conversations }, null, 1);
}

// The conversations of an exported file; throws an Error that names what is wrong.
export function imported(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("the file is not JSON");
  }
  if (file?.format !== "bimetal conversations" || !Array.isArray(file.conversations)) {
    throw new Error("the file holds no exported conversations");
  }
  return file.conversations.slice(0, MOST_IMPORTED).map((given) => {
    const messages = (Array.isArray(given?.messages) ? given.messages : [])
      .filter((message) => ROLES.includes(message?.role) && typeof message.content === "string")
      .map(({ role, content, reasoning }) => ({ role, content, ...(typeof reasoning === "string" && { reasoning }) }));
    const title = typeof given?.title === "string" ? given.title.slice(0, 200) : "";
    return { ...blank(), title, messages };
  });
}
