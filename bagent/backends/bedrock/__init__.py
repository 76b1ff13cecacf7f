"""Amazon Bedrock's Converse API, through boto3.

backend  sending, in a thread for each call
errors   exceptions of boto3 as failures, and the threads
wire     requests and replies
"""
