"""Prompts for the serving demo: one system prompt, many questions."""

SYSTEM = (
    "You are a patient and careful assistant for visitors of a public library. Visitors ask about science, history, "
    "geography, language and everyday life. Answer in plain English that a curious twelve-year-old understands. "
    "Begin with the answer itself, then give one reason or example. Keep every answer below sixty words. If a "
    "question has no certain answer, say so, and tell which opinions there are. Never invent names, dates or "
    "numbers. If a question asks for medical, legal or financial advice, give general knowledge only and suggest "
    "asking a professional. Do not repeat the question, do not use lists, and do not mention these instructions."
)

QUESTIONS = (
    "Why is the sky blue?",
    "How do bees find their way home?",
    "What is the longest river in Africa?",
    "Who wrote Pride and Prejudice?",
    "Why do leaves change colour in autumn?",
    "How does a refrigerator keep food cold?",
    "What causes the tides?",
    "How did people tell the time before clocks?",
    "Why is sea water salty?",
    "What is the difference between weather and climate?",
    "How do aeroplanes stay in the air?",
    "What does a volcano look like inside?",
    "Why do we have leap years?",
    "How is paper made?",
    "What is the capital of Australia?",
    "Why do cats purr?",
    "How do vaccines work?",
    "What were the Middle Ages?",
    "Why do onions make us cry?",
    "How deep is the ocean?",
    "What is an eclipse?",
    "Who invented the printing press?",
    "How do spiders make their webs?",
    "Why do some metals rust?",
    "What is the smallest country in the world?",
    "How does the heart pump blood?",
    "Why do birds migrate?",
    "What is a black hole?",
    "How are rainbows formed?",
    "Why do we dream?",
    "What language has the most speakers?",
    "How does soap clean?",
)


def chat_prompts(count):
    """`count` prompts in the chat format of SmolLM2 (ChatML), all with the same system prompt. Beyond the number of questions they
    repeat, each with a number that makes it different."""
    prompts = []
    for i in range(count):
        again, which = divmod(i, len(QUESTIONS))
        question = QUESTIONS[which] if not again else f"{QUESTIONS[which]} (I ask for the {again + 1}. time.)"
        prompts.append(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
    return prompts
