"""OpenAI's Responses API, stateless, as a translation over chats."""
