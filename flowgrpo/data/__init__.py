"""What goes in: rows of prompts, their images and videos, and who samples what."""
