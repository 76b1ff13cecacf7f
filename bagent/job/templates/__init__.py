"""Prompt templates.

environment    the sandbox, and its limits of time and memory
template       one template, checked at load and rendered for each row
variables      the fields that a template uses
bucket_images  images in buckets
conversations  conversations in a row's column
prompt         the messages of a row
"""
