"""The example runtime. Public names are in `kvfast.llama`.

weights -> model -> speculative, trees -> generation -> serving
                 -> documents
                 -> session
tokenizer -> prompts
fetch
"""
