"""OpenAI's API with extras of vLLM's and our own: JSON to engine requests, engine output to JSON."""
