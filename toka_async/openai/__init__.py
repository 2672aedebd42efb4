"""OpenAI's API as types: requests, responses, errors, and the checks of requests."""
