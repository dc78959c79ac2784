"""Enqueue from any Python program: submit, do something else, read the answer.

Needs the light base package only (no torch). Start Redis, `tokenmill db upgrade` and `tokenmill worker` first,
then run:  python examples/enqueue.py
"""

from __future__ import annotations

from workers.client import Client, JobFailedError


def main() -> None:
    """Submit a chat and three prompts, wait, print."""
    with Client() as client:  # reads TOKENMILL_BROKER_URL and TOKENMILL_DATABASE_URL
        chat = client.submit(
            messages=[
                {"role": "system", "content": "Answer in one short sentence."},
                {"role": "user", "content": "Why is the sky blue?"},
            ],
            max_tokens=48,
            priority=0,
            idempotency_key="sky-1",  # running this file twice does not run the job twice
        )
        others = client.submit_many(
            {
                "messages": [{"role": "user", "content": f"Name one thing made of {material}."}],
                "max_tokens": 16,
            }
            for material in ("wood", "glass", "iron")
        )
        try:
            print(chat.wait(timeout_s=120).text)
            for job in others:
                result = job.wait(timeout_s=120)
                print(f"{job.id}: {result.text!r} ({result.completion_tokens} tokens)")
        except JobFailedError as error:
            print(f"no answer: {error}")


if __name__ == "__main__":
    main()
