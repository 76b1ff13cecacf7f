"""Amazon Bedrock's Converse API, through boto3.

backend  sending, in a thread for each call, and exceptions of boto3 as failures
wire     requests and replies
"""
