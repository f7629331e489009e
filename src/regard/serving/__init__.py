"""The HTTP server of `regard serve`: dynamic batching, and the interfaces of OpenAI and LibreTranslate."""
