"""Weight files: safetensors in and out, GGUF in, and the cache of converted GGUF files."""
