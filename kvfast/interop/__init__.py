"""Rows, states and files of ggml and llama.cpp."""
