"""OpenAI's wire protocol: chat, completions, embeddings, responses."""
