"""The demo: customer messages, the JSON records they should become, and the target/draft pair trained to write them."""

from pathlib import Path

PAIR = Path(__file__).parent / "pair"
TARGET = PAIR / "target"
DRAFT = PAIR / "draft"
DEMO_PAIR = {"target": str(TARGET), "draft": str(DRAFT)}
