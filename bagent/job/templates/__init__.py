"""Prompt templates.

environment    the sandbox
limits         its limits of time and memory
template       one template, checked at load and rendered for each row
variables      the fields that a template uses
conversations  conversations in a row's column
prompt         the messages of a row
"""
