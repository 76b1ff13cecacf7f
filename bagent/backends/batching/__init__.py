"""Requests that carry several calls: lists of prompts and batches of chats."""
