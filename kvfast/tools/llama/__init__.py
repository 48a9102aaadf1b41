"""The example runtime. Public names are in `kvfast.llama`.

- fetch, weights, tokenizer, prompts: the demonstration model, its weights, its tokens, questions for the serving demo
- model, product_threads: the decoder, the threads of its products
- generation, speculative, trees: tokens one by one, guesses of a drafter, trees of guesses
- serving: continuous batching
- documents, session: documents in any order, a text in a file
"""
