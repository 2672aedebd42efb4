// Requests to this server: the API key, errors as the API words them, streams of events.

const KEY = "toka-async.key"; // in sessionStorage: of this tab only, gone when it is closed

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (text) => (text ? sessionStorage.setItem(KEY, text) : sessionStorage.removeItem(KEY)),
};

// What the server answered instead: message, status, and the field that is at fault, if one is.
export class ApiError extends Error {
  constructor(message, status, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

async function request(path, options) {
  const headers = { ...options.headers };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("the server does not answer", 0);
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw errorOf(body, response.status) ?? new ApiError(`the server answered ${response.status}`, response.status);
}

// The error in an answer, or in an event of a stream; undefined where there is none.
function errorOf(body, status) {
  const error = body?.error;
  return error ? new ApiError(String(error.message), status, error.param ?? null) : undefined;
}

export async function get(path, signal) {
  return (await request(path, { signal })).json();
}

// The events of a streamed answer, in order, those that came together as one array.
export async function* stream(path, body, signal) {
  const response = await request(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError("the answer ended too early", 0);
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    const datas = parts.map((part) => part.replace(/^data: /, ""));
    const isLast = datas.at(-1) === "[DONE]";
    const events = (isLast ? datas.slice(0, -1) : datas).map((data) => JSON.parse(data));
    const failed = events.findIndex((event) => event.error);
    if (failed >= 0) {
      yield events.slice(0, failed);
      throw errorOf(events[failed], response.status);
    }
    yield events;
    if (isLast) return;
  }
}
